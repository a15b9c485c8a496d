"""Uses an engine while the wall clock of each of its processes jumps by up to an hour; prints what it saw."""

import json
import sys
import time

import chaos_plan
from chaos_engine import check_serves, make_config

from ringcore.errors import RpcTimeoutError
from ringcore.front_end.client import EngineCoreClient

plan = chaos_plan.Plan.from_environment()
chaos_plan.enter_front_end(plan)
assert abs(time.time() - time.time()) > 1e-3
client = EngineCoreClient(make_config(sys.argv[1], step_timeout_s=60.0, stall_warning_s=60.0))
check_serves(client)
started = time.monotonic()
try:
    client.collective_rpc("nap", [0.6], timeout=0.2)
except RpcTimeoutError:
    timeout_s = time.monotonic() - started
check_serves(client)
health = client.health().state
started = time.monotonic()
client.close()
roles = [role for _, role in chaos_plan.read_roles(plan.roles_file)]
print(
    json.dumps(
        {"wild_processes": roles, "timeout_s": timeout_s, "close_s": time.monotonic() - started, "health": health}
    )
)
