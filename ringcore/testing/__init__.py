"""The engine without a model and a GPU: to test a service, and to plan capacity. It does not know what is computed."""

from ringcore.testing.clock import VirtualClock
from ringcore.testing.fake_executor import FakeExecutor
from ringcore.testing.fake_worker import FakeWorker
from ringcore.testing.faults import Fault
from ringcore.testing.hardware import HARDWARE, Hardware
from ringcore.testing.models import tiny_model_config, write_model_config
from ringcore.testing.step_cost import StepCost, StepWork

__all__ = [
    "HARDWARE",
    "FakeExecutor",
    "FakeWorker",
    "Fault",
    "Hardware",
    "StepCost",
    "StepWork",
    "VirtualClock",
    "tiny_model_config",
    "write_model_config",
]
