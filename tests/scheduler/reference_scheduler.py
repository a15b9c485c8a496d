"""The rules of the scheduler, one request and one block at a time: to be read against them, and slow.

One step in flight, one KV cache group with full attention, no prefix cache, no stop tokens. Blocks are only counted.
"""

from dataclasses import dataclass
from operator import attrgetter


@dataclass
class ReferenceRequest:
    sequence: int  # its number in the order of arrival, and its name
    num_tokens: int  # known ones
    max_total_tokens: int
    priority: int = 0  # under "fcfs" all have priority 0 and arrive at 0
    arrival_s: float = 0.0
    num_computed: int = 0
    num_blocks: int = 0
    num_times_passed: int = 0


place = attrgetter("priority", "arrival_s", "sequence")  # in the queue


def victim_key(request: ReferenceRequest) -> tuple:  # the first to be preempted is the least
    return -request.priority, request.num_computed, -request.sequence


class ReferenceScheduler:
    """After `schedule`: `work`, the tokens by request, and who was `preempted`. config: a `SchedulerConfig`."""

    def __init__(self, config, num_blocks: int, block_size: int) -> None:
        self.config, self.num_usable, self.block_size = config, num_blocks - 1, block_size  # without the null block
        self.running, self.waiting = [], []  # in the order of admission; in any order
        self.work, self.preempted = {}, set()

    def schedule(self) -> None:
        self.preempted = set()
        if self.config.preempt_lower_priority and self.waiting:
            self._make_room(min(self.waiting, key=place))
        made_room = len(self.preempted)
        while not self._share_among_running():
            self._preempt(min(self.running, key=victim_key))
        if len(self.preempted) == made_room:
            self._start_waiting()

    def update(self) -> set[int]:
        """The step has come back; who finished by it."""
        for request in self.running:
            request.num_computed += self.work.get(request.sequence, 0)
            request.num_tokens += request.num_computed == request.num_tokens
        finished = {request.sequence for request in self.running if request.num_tokens == request.max_total_tokens}
        self.remove(finished)
        return finished

    def remove(self, sequences: set[int]) -> None:
        self.running = [request for request in self.running if request.sequence not in sequences]
        self.waiting = [request for request in self.waiting if request.sequence not in sequences]

    def _share_among_running(self) -> bool:
        """The budget, oldest first, and the blocks for it; False where too few are free."""
        self.work = {}
        for request in self.running:
            self._give_tokens(request)
        return all(self._take_blocks(one, one.num_computed + self.work.get(one.sequence, 0)) for one in self.running)

    def _start_waiting(self) -> None:
        limit, passed = self.config.max_skip_ahead, []
        has_prompts = any(count > 1 for count in self.work.values())
        for request in sorted(self.waiting, key=place):
            has_row = len(self.running) < self.config.max_num_seqs
            may_pass = len(passed) <= limit and all(one.num_times_passed < limit for one in passed)
            if not has_row or not may_pass or sum(self.work.values()) == self.config.max_num_batched_tokens:
                return
            if (has_prompts and self._would_be_a_sliver(request)) or not self._take_blocks(request, request.num_tokens):
                passed.append(request)
                continue
            has_prompts = True
            self.waiting.remove(request)
            self.running.append(request)
            self._give_tokens(request)
            for one in passed:
                one.num_times_passed += 1

    def _would_be_a_sliver(self, request: ReferenceRequest) -> bool:
        whole = self.config.max_num_batched_tokens
        left = whole - sum(self.work.values())
        return left < whole / 8 and left < min(request.num_tokens, self.config.long_prefill_token_threshold or whole)

    def _make_room(self, first: ReferenceRequest) -> None:
        lower = [request for request in sorted(self.running, key=victim_key) if request.priority > first.priority]
        for count in range(1 + len(lower)):
            others = [request for request in self.running if request not in lower[:count]]
            if len(others) < self.config.max_num_seqs and self._fits(self._blocks(first.num_tokens), others):
                for victim in lower[:count]:
                    self._preempt(victim)
                return

    def _preempt(self, victim: ReferenceRequest) -> None:
        self.running.remove(victim)
        self.waiting.append(victim)
        self.preempted.add(victim.sequence)
        victim.num_computed = victim.num_blocks = 0

    def _give_tokens(self, request: ReferenceRequest) -> None:
        left = self.config.max_num_batched_tokens - sum(self.work.values())
        threshold = self.config.long_prefill_token_threshold or left
        if count := min(request.num_tokens - request.num_computed, threshold, left):
            self.work[request.sequence] = count

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _fits(self, num_blocks: int, others: list[ReferenceRequest]) -> bool:
        return num_blocks + sum(one.num_blocks for one in others) <= self.num_usable

    def _take_blocks(self, request: ReferenceRequest, num_tokens: int) -> bool:
        """Blocks for so many tokens, if they are free."""
        num_blocks = max(self._blocks(num_tokens), request.num_blocks)
        if fits := self._fits(num_blocks, [one for one in self.running if one is not request]):
            request.num_blocks = num_blocks
        return fits
