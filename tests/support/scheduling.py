"""Factories for tests of the scheduler, and the loop of `nanovllm.testing` with more checks for the shipped queues."""

from nanovllm.block_manager import BlockManager
from nanovllm.features.forks.forking import go_on_from
from nanovllm.features.groups.cache_groups import CacheGroups
from nanovllm.features.policies.loop import Loop as PolicyLoop
from nanovllm.features.policies.mock_states import check
from nanovllm.features.policies.walk import make_config
from nanovllm.features.shares.client_queue import ClientQueue
from nanovllm.scheduler import Scheduler, WaitingQueue
from nanovllm.sequence import SCHEDULING_KEY


def make_scheduler(*, block_size=4, enable_prefix_caching=True, **limits):
    """A scheduler; its blocks may be smaller than the engine allows, for more boundaries in fewer tokens."""
    config = make_config(**limits)
    manager = BlockManager(config.num_kv_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
    return shared_scheduler(config, manager)


def shared_scheduler(config, manager):
    """A scheduler whose queue keeps the shares of clients."""
    return Scheduler(config, manager, queue=ClientQueue(config, manager))


def make_group_scheduler(kinds, num_blocks, *, block_size=4, **limits):
    """A scheduler over cache groups, with a pool of so many blocks for each kind, the null block included."""
    config = make_config(**limits)
    manager = CacheGroups(
        kinds,
        num_blocks,
        block_size,
        max_model_len=config.max_model_len,
        max_chunk_tokens=config.long_prefill_token_threshold,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return shared_scheduler(config, manager)


def chunks(batch):
    """Return the positions that a batch computes, in batch order: request id -> (start, end)."""
    return {entry.sequence.request_id: (entry.start, entry.start + entry.num_new_tokens) for entry in batch.entries}


class Loop(PolicyLoop):
    """The loop of the shipped queues: forks go on from KV, and the order of clients and of victims is checked too."""

    def __init__(self, scheduler):
        super().__init__(scheduler)
        self.lost_slot = None  # to another client, in the last step
        self._successor = None  # the sequence that it is kept for
        self._gave_way = set()  # to clients that are behind, in the last step
        queue = scheduler.waiting
        self.has_shares = isinstance(queue, ClientQueue)
        self.has_order = self.has_shares or type(queue) is WaitingQueue
        if self.has_shares:
            self._slot_victim, self._block_victims = queue.slot_victim, queue.block_victims
            queue.slot_victim, queue.block_victims = self._note_slot, self._note_way

    def _note_slot(self, running):
        self.lost_slot = self._slot_victim(running)
        if self.lost_slot is not None:
            first = next(iter(self.scheduler.waiting.in_order()))
            check(self.lost_slot.client != first.client, "a client took its own slot")
            check(self.lost_slot.priority >= first.priority, "a slot was taken from a more urgent request")
            check(len(running) == self.scheduler.config.max_num_seqs, "a slot was taken while one was free")
            self._successor = first
        return self.lost_slot

    def _note_way(self, running):
        """Yield the victims; each must be of a client that was served more by over the bound than one of its level."""
        for victim in self._block_victims(running):
            others = [s for s in self.unfinished if s.priority == victim.priority]
            leads = [(victim.account.served - s.account.served) * s.account.weight for s in others]
            check(
                max(leads) > self.scheduler.waiting.bound, f"{victim} gave up its blocks, and its client is not ahead"
            )
            self._gave_way.add(victim)
            yield victim

    def fork(self, source, at, **options):
        """Add a request whose prompt is the first `at` tokens of another, from whose KV it may go on."""
        target = super().fork(source, at, **options)
        go_on_from(self.scheduler, source, target)
        self.seen["forked"] += target.is_running
        self.check()
        return target

    def steps(self, count):
        for _ in range(count):
            self.step()

    def finish(self, depth=1):
        self.drain(depth)
        self.check_outputs()

    def launch(self, non_finite=()):
        self.lost_slot = None
        self._gave_way.clear()
        return super().launch(non_finite)

    def check(self):
        super().check()
        if self.has_order:
            self._check_order()
        self._check_shares()

    def _check_step(self, was_running, batch):
        super()._check_step(was_running, batch)
        if self.has_order:
            self._check_preemptions(was_running, batch)

    def _check_order(self):
        """Check that both queues are in order of aged priority, then of arrival."""
        ageing = self.scheduler.config.priority_ageing_s
        for queue in (self.scheduler.running, self.scheduler.waiting):
            gained = [(self.now - sequence.arrival_time) / ageing if ageing else 0.0 for sequence in queue]
            order = [(s.priority - gain, s.arrival) for s, gain in zip(queue, gained, strict=True)]
            check(order == sorted(order), f"queue out of order: {order}")
            self.seen["ordered by age"] += list(queue) != sorted(queue, key=lambda s: (s.priority, s.arrival))

    def _check_shares(self):
        """Check the bound between waiting clients, and that the queue knows each client of an unfinished request."""
        queue, config = self.scheduler.waiting, self.scheduler.config
        if not self.has_shares:
            return
        smallest = min([1.0, *(config.client_weights or {}).values()])
        bound = 2 * queue.bound / smallest
        check(queue.gap <= bound, f"counters of waiting clients are {queue.gap} apart, and may be {bound}")
        self.seen["bounds checked"] += queue.gap > 0
        clients = {sequence.client for sequence in self.unfinished}
        check(
            queue.num_clients == len(clients), f"{queue.num_clients} clients are counted, {len(clients)} have requests"
        )
        check(sorted(queue.in_order(), key=SCHEDULING_KEY) == list(queue), "the order of shares loses a request")
        self.seen["clients beside each other"] += len(clients) > 1

    def _check_preemptions(self, was_running, batch):
        preempted = [sequence for sequence in was_running if not sequence.is_running]
        if self.lost_slot in preempted and self.lost_slot not in self._lost_blocks:
            preempted.remove(self.lost_slot)
            check(self._successor in self.scheduler.running, f"{self.lost_slot} gave up its slot, and nobody took it")
            self.seen["slots taken"] += 1
        preempted = [sequence for sequence in preempted if sequence not in self._gave_way]
        self.seen["blocks taken"] += bool(self._gave_way)
        if not preempted:
            return
        placed = {entry.sequence.request_id for entry in batch.entries}
        before = {sequence.request_id for sequence in was_running}
        check(placed <= before, "a step that preempted admitted a request")
        oldest = min(sequence.key for sequence in preempted)
        is_shared = self.has_shares and self.scheduler.waiting.is_shared
        for sequence in () if is_shared else self.scheduler.running:
            spared = sequence.key < oldest or sequence.request_id in placed
            check(spared, f"{sequence} was spared, though younger than one that was preempted")
        check(self.scheduler.running[0].key < oldest, "a sequence was preempted for a younger one")
