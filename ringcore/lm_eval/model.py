"""`RingcoreLM`, registered with lm-eval as "ringcore"."""

from __future__ import annotations

import itertools
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ringcore.checkpoint.chat_template import conversation_json
from ringcore.errors import ConfigError
from ringcore.front_end.llm import LLM
from ringcore.lm_eval.likelihoods import log_likelihoods, longest_scored
from ringcore.params.sampling_params import SamplingParams

__all__ = ["RingcoreLM"]


@register_model("ringcore")
class RingcoreLM(TemplateLM):
    """path: the model. max_gen_toks: of a task that does not say it. prefix_token_id: the context of a text without
    one; default: BOS, else end of text. think_end_token: what ends reasoning, which is cut off before a task's stop
    strings apply. batch_size, max_batch_size: no effect, since the engine batches. Others are engine options."""

    def __init__(
        self,
        path: str,
        *,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        device: str | None = None,
        **engine_options: Any,
    ) -> None:
        super().__init__()
        self._path, self._max_gen_toks, self._think_end_token = path, max_gen_toks, think_end_token
        self.llm = LLM(path, **engine_options | ({} if device is None else {"device": device}))
        self.tokenizer = self.llm.get_tokenizer()
        known = (prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        prefix = next((one for one in known if one is not None), None)
        if prefix is None:
            self.llm.close()
            raise ConfigError("prefix_token_id: the model names no BOS and no end-of-text token; give one")
        self._prefix_token_id = prefix

    @property
    def eot_token_id(self) -> int:
        token_id = self.tokenizer.eos_token_id
        return self._prefix_token_id if token_id is None else token_id

    @property
    def prefix_token_id(self) -> int:
        return self._prefix_token_id

    @property
    def max_length(self) -> int:
        return self.llm.ready.max_model_len

    @property
    def tokenizer_name(self) -> str:
        return self._path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        goes_on = not add_generation_prompt
        return self.tokenizer.render_conversation(
            conversation_json(chat_history, add_generation_prompt, continue_final_message=goes_on)
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """None: as the model's files say, unless the text begins with BOS."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token_id
            add_special_tokens = bos is None or not string.startswith(self.tokenizer.token_text(bos))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: object) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        found = log_likelihoods(self.llm, pairs, use_tqdm=not disable_tqdm)
        for (key, _, _), one in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, one)
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        windows = [list(self._windows(*request.args)) for request in requests]
        scored = iter(log_likelihoods(self.llm, list(itertools.chain(*windows)), use_tqdm=not disable_tqdm))
        found = [sum(next(scored)[0] for _ in of_text) for of_text in windows]
        for request, one in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, one)
        return found

    def _windows(self, text: str) -> Any:
        """Each token is predicted once; a window's context and continuation fit into one request."""
        room = longest_scored(self.llm) - 1
        token_ids = self.tok_encode(text)
        return map(make_disjoint_window, get_rolling_token_windows(token_ids, self.prefix_token_id, room, 1))

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        if not requests:
            return []
        asked = [normalize_gen_kwargs(request.args[1], self._max_gen_toks) for request in requests]
        prompts = [
            self._prompt(request.args[0], one["max_gen_toks"]) for request, one in zip(requests, asked, strict=True)
        ]
        outputs = self.llm.generate(prompts, [self._params(one) for one in asked], use_tqdm=not disable_tqdm)
        texts = []
        for request, one, output in zip(requests, asked, outputs, strict=True):
            text = postprocess_generated_text(output.outputs[0].text, self._stops(one), self._think_end_token)
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    def _prompt(self, context: str, max_gen_toks: int) -> dict[str, Any]:
        """Its last tokens, if with the answer it is longer than `max_length`."""
        token_ids = self.tok_encode(context) or [self.prefix_token_id]
        return {"prompt_token_ids": token_ids[-max(1, self.max_length - max_gen_toks) :]}

    def _params(self, asked: Any) -> SamplingParams:
        """Unknown names are `UnknownOptionError`."""
        others = {name: value for name, value in asked.items() if name not in ("until", "max_gen_toks", "do_sample")}
        stop = None if self._think_end_token is not None else [text for text in asked["until"] if text]
        return SamplingParams(
            **{"skip_special_tokens": False, "max_tokens": asked["max_gen_toks"], "stop": stop} | others
        )

    def _stops(self, asked: Any) -> list[str]:
        return [*asked["until"], self.tokenizer.token_text(self.eot_token_id)]
