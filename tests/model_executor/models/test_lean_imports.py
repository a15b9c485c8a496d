"""transformers' modeling code is imported without torch's compiler and DTensor, and computes the same."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from contextlib import contextmanager

import pytest
import torch

from ringcore.checkpoint import find_model
from ringcore.checkpoint.spec_reader import read_model_spec
from ringcore.distributed.parallel import SingleRank
from ringcore.families import FAMILIES
from ringcore.model_executor import models


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


def test_other_packages_are_not_imported_and_one_that_needs_the_compiler_gets_it(tmp_path):
    """As where someone trains, scores and sees by the same environment: transformers goes on without them, and
    torchvision asks for a module of the compiler."""
    packages = ("accelerate", "scipy", "sklearn", "torchaudio", "torchvision")
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        about = tmp_path / f"{package}-99.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 99.0\n")
        (about / "top_level.txt").write_text(package)
    (tmp_path / "torchvision/__init__.py").write_text("from torch._dynamo.utils import counters\n")
    found = run(f"""
        import sys, torch
        from ringcore.model_executor.models.lean_imports import without_compiler

        sys.path.insert(0, {str(tmp_path)!r})
        with without_compiler():
            import ringcore.model_executor.models.transformers
            print([name for name in {packages} if name in sys.modules], type(sys.modules["torch._dynamo"]).__name__)
            import torchvision
        utils = torch._dynamo.utils
        print(type(torch._dynamo).__name__, utils is sys.modules["torch._dynamo.utils"], utils.__spec__.has_location)
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        print(torchvision.counters is utils.counters, compiled(torch.tensor(1)).item())
        print([type(finder).__name__ for finder in sys.meta_path if "ringcore" in type(finder).__module__])
        from transformers.utils import import_utils
        print([getattr(import_utils, f"is_{{name}}_available")() for name in {packages}])
    """)
    assert found == ["[] _StandIn", "module True True", "True 2", "[]", str([True] * len(packages))]


def test_how_long_the_stand_ins_stay():
    """While one of two threads is at it; not where transformers cannot be imported; and until one is asked for what it
    does not have, which it is the module itself that gives."""
    found = run("""
        import sys, threading, types
        import torch
        from ringcore.model_executor.models.lean_imports import without_compiler

        def kind():
            return type(sys.modules.get("torch._dynamo")).__name__

        sys.modules["transformers"] = None
        for _ in range(2):
            try:
                with without_compiler():
                    print("not reached")
            except ImportError:
                print(kind())
        for name in ("transformers", "transformers.utils", "transformers.utils.import_utils"):
            sys.modules[name] = types.SimpleNamespace()
        begun, ended = threading.Event(), threading.Event()

        def other():
            with without_compiler():
                begun.set()
                ended.wait()

        thread = threading.Thread(target=other)
        thread.start()
        begun.wait()
        with without_compiler():
            pass
        print(kind())
        ended.set()
        thread.join()
        print(kind())
        with without_compiler():
            print(hasattr(sys.modules["torch._dynamo"], "__file__"), kind())
            print(torch._dynamo.reset.__module__, kind())
        print(kind())
    """)
    threads, asked = ["_StandIn", "NoneType"], ["False _StandIn", "torch._dynamo module"]
    assert found == ["NoneType", "NoneType", *threads, *asked, "module"]


@pytest.mark.parametrize("is_own", [False, True])
def test_they_are_for_processes_of_the_engine(checkpoint, monkeypatch, is_own):
    """In an application's own process transformers is imported as it always is."""
    _, folder = checkpoint("Llama")
    entered = []

    @contextmanager
    def noted():
        entered.append(True)
        yield

    monkeypatch.setattr(models, "without_compiler", noted)
    monkeypatch.setattr(models, "is_own_process", lambda: is_own)
    spec = read_model_spec(find_model(folder), FAMILIES, "transformers")
    models.build_model(spec, SingleRank(), torch.float32, 64)
    assert entered == [True] * is_own
