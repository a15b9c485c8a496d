"""Run by the interpreter at its start, in every process of a scenario: its folder is on their PYTHONPATH."""

import os

if "RINGCORE_CHAOS" in os.environ:
    import chaos_plan

    chaos_plan.enter_process()
