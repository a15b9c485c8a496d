"""transformers' modeling code is imported without torch's compiler and DTensor, and computes the same."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def run(script):
    """Prints of a fresh process, where nothing is imported yet."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_neither_is_imported_and_both_work_afterwards():
    found = run("""
        import sys, torch
        from ringcore.model_executor.models.lean_imports import without_compiler

        with without_compiler():
            from transformers.models.llama import LlamaConfig, LlamaForCausalLM
        print([name for name in sys.modules if name.startswith(("torch._dynamo", "torch.distributed.tensor", "sympy"))])
        sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 16}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **sizes))
        print(model(torch.tensor([[1, 2, 3]])).logits.isfinite().all().item())
        import transformers.utils, transformers.masking_utils
        print(transformers.utils.is_torch_distributed_available())
        with transformers.masking_utils.TransformGetItemToIndex():
            print(torch.vmap(lambda at: torch.arange(3)[at])(torch.tensor([2, 0])).tolist())
        print(torch.compile(lambda x: x + 1, backend="eager")(torch.tensor(1)).item())
        print(type(sys.modules["torch._dynamo"]).__name__)
    """)
    assert found == ["[]", "True", "True", "[2, 0]", "2", "module"]


def test_what_is_asked_for_meanwhile_is_the_module_itself():
    found = run("""
        import sys, torch
        from ringcore.model_executor.models.lean_imports import without_compiler

        with without_compiler():
            print(type(sys.modules["torch._dynamo"]).__name__, hasattr(sys.modules["torch._dynamo"], "__file__"))
            print(torch._dynamo.reset.__module__)
        print(type(sys.modules["torch._dynamo"]).__name__)
    """)
    assert found == ["_StandIn False", "torch._dynamo", "module"]


def test_two_threads_at_a_time():
    found = run("""
        import sys, threading
        from ringcore.model_executor.models.lean_imports import without_compiler

        begun, ended = threading.Event(), threading.Event()

        def other():
            with without_compiler():
                begun.set()
                ended.wait()

        thread = threading.Thread(target=other)
        thread.start()
        begun.wait()
        with without_compiler():
            import transformers.masking_utils
        print("torch._dynamo" in sys.modules)
        ended.set()
        thread.join()
        print("torch._dynamo" in sys.modules)
    """)
    assert found == ["True", "False"]


@pytest.mark.parametrize("is_own", [False, True])
def test_it_is_for_processes_of_the_engine(checkpoint, is_own):
    """In an application's own process transformers is imported as it always is."""
    _, folder = checkpoint("Llama")
    found = run(f"""
        import sys, torch
        from ringcore.checkpoint import find_model
        from ringcore.checkpoint.spec_reader import read_model_spec
        from ringcore.distributed.parallel import SingleRank
        from ringcore.families import FAMILIES
        from ringcore.host.own_process import mark_own_process
        from ringcore.model_executor.models import build_model

        spec = read_model_spec(find_model({str(folder)!r}), FAMILIES, "transformers")
        if {is_own}:
            mark_own_process()
        build_model(spec, SingleRank(), torch.float32, 64)
        print("torch._dynamo" in sys.modules, "torch.distributed.tensor" in sys.modules)
    """)
    assert found == ["False False" if is_own else "True True"]


def test_without_transformers():
    found = run("""
        import sys
        from ringcore.model_executor.models.lean_imports import without_compiler

        sys.modules["transformers"] = None
        for _ in range(2):
            try:
                with without_compiler():
                    print("not reached")
            except ImportError:
                print("torch._dynamo" in sys.modules)
    """)
    assert found == ["False", "False"]
