"""The engine without a model or a GPU: a fake executor for tests of services, a simulator for capacity planning."""

from ringcore.testing.clock import VirtualClock
from ringcore.testing.fake_executor import FakeExecutor
from ringcore.testing.fake_worker import FakeWorker
from ringcore.testing.faults import Fault
from ringcore.testing.hardware import HARDWARE, Hardware
from ringcore.testing.models import tiny_model_config, write_model_config
from ringcore.testing.simulation_result import Latency, SimulationResult
from ringcore.testing.simulator import Simulator
from ringcore.testing.speculator import FakeSpeculator
from ringcore.testing.step_cost import StepCost, StepWork, read_measurements
from ringcore.testing.trace import Trace, poisson_trace, read_trace, write_trace

__all__ = [
    "HARDWARE",
    "FakeExecutor",
    "FakeSpeculator",
    "FakeWorker",
    "Fault",
    "Hardware",
    "Latency",
    "SimulationResult",
    "Simulator",
    "StepCost",
    "StepWork",
    "Trace",
    "VirtualClock",
    "poisson_trace",
    "read_measurements",
    "read_trace",
    "tiny_model_config",
    "write_model_config",
    "write_trace",
]
