"""`ringcore tune`: the fastest tiles of a model's products on this GPU, found ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from ringcore.cli.options import engine_options, given, with_options

__all__ = ["make_tune"]

_BUDGET_S = 600.0


def make_tune() -> Callable[..., None]:
    """The command, with a flag for every engine option; the model is its argument."""
    return with_options(tune, _engine_flags())


def _engine_flags() -> list[Any]:
    own = ("model", "start_from", "kernel_autotune", "kernel_autotune_timeout_s")
    return [option for option in engine_options() if option.name not in own]


def tune(
    model: Annotated[str, typer.Argument(help="a model folder, a .gguf file, or a hub id")],
    seconds: Annotated[float, typer.Option(min=1, max=1500, help="no shape is begun later")] = _BUDGET_S,
    **options: Any,
) -> None:
    """Searches the fastest tiles of a model's products on this GPU, and keeps them in the user's cache.

    Engines with --kernel-autotune take them from there, and search nothing at their start. They are kept by device,
    driver, versions and shape: give the options that change shapes, as --tensor-parallel-size. Exit code 1 where some
    are left.

    Examples:

    \b
      ringcore tune ./model
      ringcore tune ./model --tensor-parallel-size 2 --seconds 1200
      ringcore serve ./model --kernel-autotune
    """
    from ringcore.config import EngineConfig
    from ringcore.front_end.client_start import start_client

    chosen = given(options, _engine_flags()) | {"kernel_autotune": True, "kernel_autotune_timeout_s": seconds}
    client = start_client(EngineConfig.from_options(model=model, **chosen))
    try:
        client.wait_ready()
        tuning = client.ready.kernel_tuning
    finally:
        client.close()
    if tuning is None:
        print("ringcore: this device has no kernels with tiles: there is nothing to search")
        return
    print(f"ringcore: {tuning.in_words}")
    if tuning.num_known < tuning.num_shapes:
        raise typer.Exit(1)
