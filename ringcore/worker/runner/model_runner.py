"""Runs steps: applies the delta to the persistent batch and has a launcher execute the step on the device."""

from __future__ import annotations

import torch

from ringcore.config import EngineConfig
from ringcore.distributed.parallel import TensorParallel
from ringcore.distributed.pipeline import StageLink
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import NewRequest, SchedulerOutput
from ringcore.tracing import Tracer, now_ns
from ringcore.tracing.kinds import APPLIED
from ringcore.worker.drafts.head_runs import HeadRuns
from ringcore.worker.drafts.methods import make_proposer
from ringcore.worker.logits.pooled_prompts import PooledPromptRows
from ringcore.worker.logits.prompt_logprobs import PromptLogprobRows
from ringcore.worker.logits.row_adjustments import RowAdjustments
from ringcore.worker.logits.sampling_stage import SamplingStage
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.rows.request_rows import RequestRows
from ringcore.worker.runner.draft_costs import measure_costs
from ringcore.worker.runner.head_graphs import HeadGraphs
from ringcore.worker.runner.loaded_model import LoadedModel
from ringcore.worker.runner.paged_model import PagedModel
from ringcore.worker.runner.step_launcher import LaunchedSteps, StepLauncher, StepStages

__all__ = ["ModelRunner"]


class ModelRunner:
    """One rank's model, KV cache and persistent batch. Steps are executed in order, and a row's next input is its own
    last token, so the scheduler may schedule a step before it knows the tokens of the previous one (async scheduling).

    rows -> input stage -> forward pass (`PagedModel`) -> `SamplingStage` -> rows, and the output. A `StepLauncher`
    connects these stages for one kind of device: the host's own (`HostLauncher`), or an asynchronous one
    (`DeviceLauncher`).
    """

    @torch.inference_mode()
    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        kv_cache_config: KVCacheConfig,
        platform: Platform,
        is_output_rank: bool,
        launcher: type[StepLauncher],
        tracer: Tracer,
        link: StageLink | None = None,
        may_draft: bool = True,
    ) -> None:
        """Allocates the pages. link: to the other stages of a pipeline. may_draft: False: no row has drafts, whatever
        `speculative` is. Raises `CapacityError` or `ConfigError`."""
        spec, device = config.model.spec, platform.device
        self._is_output_rank = is_output_rank
        backend, is_invariant = config.device.attention_backend, config.model.deterministic
        self.paged = PagedModel.allocate(loaded.model, backend, kv_cache_config, platform, is_invariant)
        self.adjustments = RowAdjustments(config, device, loaded.dtype, launcher.adjustment_ops)
        prompt_logprobs = PromptLogprobRows(spec.vocab_size, loaded.model.compute_logits, is_output_rank, is_invariant)
        pooled_prompts = PooledPromptRows(config.scheduler.max_num_seqs, self._is_output_rank)
        # What a request asks of its tokens and logits is kept where these are. Which rows decode, and so the order of a
        # batch, is the same in every stage.
        of_last = (self.adjustments, prompt_logprobs) if loaded.model.stage.is_last else ()
        listeners = (pooled_prompts, *of_last)
        self.rows = RequestRows(config.scheduler.max_num_seqs, kv_cache_config, len(spec.eos_token_ids), listeners)
        sampling = SamplingStage(self.rows, self.adjustments, self._is_output_rank, is_invariant)
        self._stages = StepStages(
            paged=self.paged,
            rows=self.rows,
            adjustments=self.adjustments,
            prompt_logprobs=prompt_logprobs,
            pooled_prompts=pooled_prompts,
            sampling=sampling,
            device=device,
            dtype=loaded.dtype,
            tracer=tracer,
            link=link,
            proposer=make_proposer(config, self.rows, self._head_runs(config)) if may_draft else None,
        )
        self.launcher = launcher(self._stages, config, kv_cache_config)
        self._kv_cache_config, self._tracer = kv_cache_config, tracer

    def _head_runs(self, config: EngineConfig) -> HeadRuns | None:
        """Of the head that drafts; None: there is none."""
        head, paged = self.paged.model.draft_head, self.paged
        if head is None:
            return None
        index = head.attention.index
        group = paged.group_of_layer[index]
        is_eager = config.device.enforce_eager or paged.kv_caches[index].device.type != "cuda"
        runs = HeadRuns if is_eager else HeadGraphs
        return runs(head, paged.backends[group], paged.kv_caches[index], self.rows, group)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> LaunchedSteps:
        """Launches the one or several steps of a message; the returned object's `result()` is their output."""
        self.launcher.follow()
        began = self._tracer.is_on and now_ns()
        appended = self.rows.apply(step)
        self.launcher.mirror(step.new_requests, appended)
        if began:
            self._tracer.record((APPLIED.number, began, now_ns(), step.step))
            self._tracer.check(began)  # of a worker in the engine's process, which has no loop of its own
        scheduled, counts = self.rows.scheduled, step.num_scheduled_tokens
        if self._stages.proposer is not None:
            self._stages.proposer.margin = step.draft_margin
        output = LaunchedSteps(step.step, len(scheduled), self._is_output_rank)
        for index in range(step.num_steps if len(scheduled) else 0):
            output.read(index + 1 - self.launcher.max_unread_steps)
            first = (counts if index == 0 else None), output.errors, step.max_gained
            output.launched.append(self.launcher.launch(scheduled, *first))
        return output

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs a prompt of one token, so that libraries do their lazy initialization before the first request.

        It leaves a token in block 1, which the first request that gets the block overwrites.
        """
        if self._kv_cache_config.max_model_len >= 2:
            self.execute(_one_token(len(self._kv_cache_config.groups))).result()
            self.rows.clear()
        self.launcher.warm_up()

    def learn_costs(self, tp: TensorParallel) -> None:
        """Tells the proposer, if there is one, what steps cost; on all ranks together, while there are no rows."""
        stages = self._stages
        if stages.proposer is None:
            return
        plan = self._kv_cache_config
        block_size = max(group.spec.block_size for group in plan.groups)
        most = min(plan.max_model_len, (plan.num_blocks // len(plan.groups) - 1) * block_size)
        most = min(most, stages.proposer.config.scheduler.max_sampled_positions)
        costs = measure_costs(self.launcher, stages.proposer, most, stages.device, tp)
        if costs is not None:
            stages.proposer.learn_costs(costs)

    @property
    def num_graphs_left(self) -> int:
        """CUDA graphs that are not captured yet."""
        return self.launcher.num_graphs_left

    @torch.inference_mode()
    def capture_graph(self) -> None:
        """Captures one of the missing graphs, the largest first; called between steps, on all ranks together, since the
        warm-up run before a capture is a step with collectives."""
        self.launcher.capture_graph()


def _one_token(num_groups: int) -> SchedulerOutput:
    """A step of one request with a prompt of one token, in block 1 of each KV cache group."""
    request = NewRequest(
        row=0,
        token_ids=int_array([0]),
        num_prompt_tokens=1,
        num_computed_tokens=0,
        num_cached_tokens=0,
        block_ids=[int_array([1])] * num_groups,
        sampling_params=SamplingParams(),
        seed=0,
        stop_token_ids=[],
    )
    return SchedulerOutput(
        step=0,
        num_steps=1,
        finished_rows=int_array(),
        new_requests=[request],
        new_blocks=[],
        rows=int_array([0]),
        num_scheduled_tokens=None,
        num_tokens=1,
    )
