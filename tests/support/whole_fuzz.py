"""One fuzz of everything: the real engine with every feature over a mock device, in any order of calls, at any size.

    python -m tests.support.whole_fuzz --steps 1000000 --seconds 180

Each walk draws a kind of cache, limits and features, and opens one or two engines, one after the other, on one folder
of files. It calls in any order: requests of clients with any option, streams, forks, beams, steps that fail at any
place, NaN, aborts, time, idle time, resets, updates of the weights, damaged files, a full disk. `EngineLoop` checks
every invariant after each call, and `MockDevice` every read of every step. A seed alone decides all of a walk.
"""

import argparse
import logging
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from nanovllm.config import MAX_PRIORITY
from nanovllm.errors import DeviceError, EngineClosedError, EngineDeadError, QueueFullError, StepError
from nanovllm.features.beams.beam_search import Search
from nanovllm.features.beams.books import BeamBooks, BeamSearchParams
from nanovllm.features.forks.forking import add_fork
from nanovllm.features.logprobs.logprobs import Measured
from nanovllm.features.policies.mock_states import check
from nanovllm.features.policies.walk import CLIENTS, Sizes, make_prompt
from nanovllm.features.sampling_params import EmbeddingParams, SamplingParams
from nanovllm.features.speculation.lengths import DraftLengths
from nanovllm.llm import Interrupts
from nanovllm.outputs import OutputKind, RequestOutput
from nanovllm.scheduler import WaitingQueue
from tests.support.engine_loop import SALTS, Clock, Disk, EngineLoop, FuzzLLM, damage, mocked, open_engine
from tests.support.mock_device import VOCAB_SIZE, Faults, Weights, prefix_of, text_of
from tests.support.mock_drafts import GuessingDrafter
from tests.support.step_costs import RandomCosts, make_budget

NUM_CALLS = 70
STOPS = ("ab", "h", "cd", "ba", "c", "efg")
SHARES = (0.0, 0.7, 1.0)  # of drafts that are right
RATES = {"stop": 0.4}  # how often a request has an option; 0.07 for any other


@dataclass
class Call:
    """A caller: its requests, and their outputs so far. A stream is read by the walk, when it likes."""

    outputs: list[RequestOutput] = field(default_factory=list)
    stream: Iterator[RequestOutput] | None = None
    is_delta: bool = False


class Drafts(GuessingDrafter):
    """Drafts that the device draws next, each with some probability; some calls fail."""

    device = None

    def propose(self, requests):
        if self._rng.random() < 0.02:
            raise ValueError("no drafts")
        return super().propose(requests)

    def token(self, request, prefix, position):
        return self.device.draw(request.sequence, prefix, position)


class Processor:
    """A logits processor that notes whether the tokens it is given are those of the row."""

    def __init__(self, weights, salt):
        self._weights = weights
        self._salt = salt
        self.error = ""

    def __call__(self, token_ids, logits):
        expected = self._weights.logits(prefix_of(self._salt, token_ids))
        if logits.isfinite().all() and not torch.equal(logits, torch.from_numpy(expected)):
            self.error = f"a logits processor was given {token_ids} beside the logits of other tokens"
        return logits


class Walk:
    """One engine's life; see `walk`."""

    def __init__(self, rng, sizes, folder, shared, options):
        self.rng = rng
        self.sizes = sizes
        self.folder = folder
        self.weights, self.clock, self.disk = shared
        self.faults = Faults()
        drafts = options.get("speculation")
        self.engine = open_engine(self.clock, self.faults, **options)
        if "policies" not in options:
            self.set_policies()
        self.loop = EngineLoop(self.engine, self.weights, self.faults, rng)
        self.llm = FuzzLLM(self.engine)
        self.calls = {}
        self.processors = []
        self.planted = []  # errors that steps may raise
        self.max_unfinished = rng.choice((2, 4, 12))
        if drafts is not None:
            self.engine.scheduler.proposer.lengths = DraftLengths(rng.randint(1, 7), overlap=self.engine.config.overlap)
            if isinstance(drafts, Drafts):
                drafts.device = self.loop.model

    def set_policies(self):
        """A budget of a latency goal, by predictions without sense; no shares of clients; few hashes."""
        rng = self.rng
        scheduler = self.engine.scheduler
        limits = self.sizes.limits
        if rng.random() < 0.3:
            names = "max_num_batched_tokens", "long_prefill_token_threshold"
            options = {name: limits[name] for name in names} | {"ttft_goal": rng.choice((None, 1.0))}
            options |= {"block_size": self.sizes.block_size, "overlap": self.engine.config.overlap}
            goal = rng.choice((1e-3, 0.1, 10.0))
            scheduler.budget = make_budget(goal, RandomCosts(rng), clock=self.clock, **options)
        if rng.random() < 0.1:
            scheduler.waiting = WaitingQueue()
        if rng.random() < 0.15:  # hashes of blocks collide
            manager = self.engine.block_manager
            manager._digest = lambda data, digest=manager._digest: bytes([digest(data)[0] & 3])

    # ------------------------------------------------------------------------------------------------ new requests

    def prompt(self):
        rng = self.rng
        tail = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 3))]
        return make_prompt(rng.randrange(3), rng.randint(0, 24), tail)[: self.engine.config.max_model_len - 1]

    def params(self, prompt, salt, **more):
        """Options of a request, each with its own probability."""
        rng = self.rng
        max_tokens = rng.choice((None, rng.randint(1, 12)))
        room = min(self.engine.config.max_model_len - len(prompt), max_tokens or 100)
        options = {
            "max_tokens": max_tokens, "temperature": rng.choice((0.0, 0.0, 0.0, 1.5)),
            "stop_token_ids": rng.choice(((), (), (0,), (3, 5))),
        }  # fmt: skip
        rare = {
            "seed": rng.randrange(3), "logprobs": rng.randint(0, 2), "prompt_logprobs": rng.randint(0, 2),
            "min_tokens": rng.randint(0, min(4, room)), "logit_bias": {rng.randrange(VOCAB_SIZE): 100.0},
            "allowed_token_ids": tuple(rng.sample(range(VOCAB_SIZE), 3)), "top_k": rng.randint(1, 4), "top_p": 0.7,
            "min_p": 0.2, "stop": tuple(rng.sample(STOPS, rng.randint(1, 2))),
        }  # fmt: skip
        options |= {name: value for name, value in rare.items() if rng.random() < RATES.get(name, 0.07)}
        if self.sizes.block_size == 1:  # an engine has blocks of 16 or more, and no chunk of one token within a prompt
            options.pop("prompt_logprobs", None)
        if rng.random() < 0.07 and not options.get("logit_bias") and not options.get("allowed_token_ids"):
            self.processors.append(Processor(self.weights, salt))
            options |= {"logits_processors": (self.processors[-1],), "min_tokens": 0}
        return SamplingParams(**(options | more))

    def options(self, salt):
        rng = self.rng
        return {
            "priority": rng.choice((0, 0, 0, 1, -1)), "cache_salt": salt, "client": rng.choice(CLIENTS),
            "timeout": rng.choice((None, None, None, 4.0, 20.0)),
        }  # fmt: skip

    @property
    def has_room(self):
        return len(self.loop.unfinished) < self.max_unfinished

    def add(self):
        """A request as a server's: outputs of any kind, n samples, an embedding."""
        rng = self.rng
        if not self.has_room:
            return
        prompt = self.prompt()
        salt = rng.choice((*SALTS[:1] * 3, SALTS[1]))
        n = rng.choice((1, 1, 1, 2, 4))
        params = self.params(prompt, salt, **({"n": n, "temperature": 1.5} if n > 1 else {}))
        if rng.random() < 0.05:
            params = EmbeddingParams()
        self.queue(self.process(prompt, params, salt, rng.choice(list(OutputKind))))

    def process(self, prompt, params, salt, kind):
        process_one = self.engine.input_processor.process_one
        return process_one(next(self.llm._request_ids), prompt, params, output_kind=kind, **self.options(salt))

    def queue(self, request, add=None):
        limit = self.engine.config.max_queue
        num_unfinished = len(self.loop.unfinished) + request.params.n
        is_full = limit is not None and num_unfinished > limit + self.engine.config.max_num_seqs
        try:
            (add or self.engine.add)(request)
        except QueueFullError:
            check(is_full, "a request was refused, and the queue has room")
            self.loop.seen["refused"] += 1
            return
        check(not is_full, "a request was queued beyond max_queue")
        call = self.calls[request.request_id] = Call(is_delta=request.output_kind is OutputKind.DELTA)
        self.llm._inboxes[request.request_id] = call.outputs
        self.loop.check()

    def begin(self, stream):
        self.calls[len(self.calls)] = Call(stream=stream)

    def open_stream(self):
        if self.has_room:
            prompt = self.prompt()
            salt = self.rng.choice(SALTS)
            self.begin(self.llm.stream(prompt, self.params(prompt, salt), **self.options(salt)))

    def fork(self):
        """Forks of one request after another, some of them forks of forks, before the next step."""
        rng = self.rng
        for _ in range(rng.choice((1, 1, 2, 3))):
            running = [r for r in self.engine.requests.values() if r.sequences[0].is_running]
            if not running or not self.has_room:
                return
            source = rng.choice(running[-2:]).sequences[0]
            num_known = len(source.token_ids)
            salt = source.cache_salt
            prompt = source.token_ids[: rng.choice((num_known, num_known, rng.randint(1, num_known)))].tolist()
            if len(prompt) < self.engine.config.max_model_len:
                request = self.process(prompt, self.params(prompt, salt), salt, OutputKind.CUMULATIVE)
                self.queue(request, add=partial(add_fork, self.engine, source.request_id))

    def resume(self):
        last = [call.outputs[-1] for call in self.calls.values() if call.outputs and not call.is_delta]
        reasons = "length", "abort", "timeout"
        ended = [out for out in last if len(out.outputs) == 1 and out.outputs[0].finish_reason in reasons]
        if not ended or not self.has_room:
            return
        output = self.rng.choice(ended)
        num_tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
        if num_tokens < self.engine.config.max_model_len:
            params = SamplingParams(temperature=0.0, max_tokens=self.rng.choice((None, 3)))
            self.begin(self.llm.resume(output, params))
            self.loop.seen["resumed"] += 1

    # ------------------------------------------------------------------------------------------------------- steps

    def step(self):
        self.clock.now += self.rng.choice((0, 0, 0, 0.125, 1))
        self.guarded(self.step_once)

    def step_once(self):
        with self.llm._turn() as engine:
            if engine.outputs or engine.requests:
                self.llm._step(engine, Interrupts())
            else:
                engine.step()

    def guarded(self, action, *, fails=True):
        """Whether an action succeeds. A planted error may fail its step, and requests of a failed step may end."""
        loop = self.loop
        try:
            action()
            return True
        except StepError as error:
            cause = error.__cause__.__cause__ if isinstance(error.__cause__, DeviceError) else error.__cause__
            check(cause in self.planted, f"a step fails by itself: {error.__cause__!r}")
            loop.seen["failed steps"] += 1
            is_served = self.engine.requests.keys() >= {*error.request_ids}
            if fails and is_served and not self.engine.is_dead and self.rng.random() < 0.5:
                self.engine.fail(error, self.rng.randint(1, 3))
        except KeyboardInterrupt as error:
            check(error in self.planted, "an interrupt that nobody sent")
            loop.seen["interrupts"] += 1
        except QueueFullError:
            check(self.engine.config.max_queue is not None, "a stream was refused without a limit")
            loop.seen["refused"] += 1
        if not self.engine.is_dead:
            loop.num_steps_without_progress = 0
            loop.check()
        return False

    def read(self, call):
        """Read a stream's next output."""

        def read():
            output = next(call.stream, None)
            if output is None:
                call.stream = iter(())
            else:
                call.outputs.append(output)

        if not self.guarded(read):
            call.stream = iter(())
        elif call.stream is not None:
            self.loop.seen["streamed"] += 1

    def read_one(self):
        if streams := self.streams:
            self.read(self.rng.choice(streams))

    @property
    def streams(self):
        return [call for call in self.calls.values() if hasattr(call.stream, "close")]

    def drop_stream(self):
        if streams := self.streams:
            call = self.rng.choice(streams)
            call.stream.close()
            call.stream = iter(())
            self.loop.seen["dropped streams"] += 1
            self.loop.num_steps_without_progress = 0
            self.loop.check()

    def fail(self):
        """Make a coming step fail."""
        error = RuntimeError("boom")
        if self.rng.random() < 0.1:
            error = KeyboardInterrupt()
        self.faults.place = self.rng.choice(Faults.PLACES)
        self.faults.error = error
        self.planted.append(error)

    def turn_non_finite(self):
        if unfinished := self.loop.unfinished:
            self.faults.non_finite = {self.rng.choice(unfinished).request_id}

    def abort(self):
        served = [request_id for request_id in self.engine.requests if request_id in self.calls]
        if served:
            request_id = self.rng.choice(served)
            self.calls[request_id].outputs.append(self.loop.abort(request_id))
            self.llm._inboxes.pop(request_id)
            check(self.loop.abort(request_id) is None, "a request ends twice")

    def beam_search(self):
        """A beam search among the other requests; its beams are those of the device alone, unless a step fails."""
        engine = self.engine
        rng = self.rng
        loop = self.loop
        prompt = self.prompt()
        salt = rng.choice(SALTS)
        params = BeamSearchParams(rng.randint(1, 4), rng.randint(1, 6), ignore_eos=True)
        options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": params.max_tokens}
        request = engine.input_processor.process_one(
            next(self.llm._request_ids), prompt, SamplingParams(**options, logprobs=2 * params.beam_width),
            priority=-MAX_PRIORITY, cache_salt=salt,
        )  # fmt: skip
        books = BeamBooks(params, prompt, ())
        try:
            search = Search(engine, params, [(request, books)], self.llm._request_ids)
        except ValueError:  # the cache cannot hold so many beams, or has states
            return
        try:
            while search.begin_more() and self.guarded(self.step_once, fails=False):
                search.advance()
                for sequence in loop.sequences:
                    if sequence.priority == -MAX_PRIORITY:
                        loop.model.forget(sequence)
        except (RuntimeError, QueueFullError) as error:
            check("finite" in str(error) or "max_queue" in str(error), f"a beam search failed: {error}")
        finally:
            search.close()
        loop.num_steps_without_progress = 0
        loop.check()
        if books.is_done:
            loop.seen["beam searches"] += 1
            found = [result.tokens for result in books.results]
            expected = [result.tokens for result in self.beams_alone(books, salt).results]
            check(found == expected, f"the beams are {found}, alone they are {expected}")

    def beams_alone(self, books, salt):
        alone = BeamBooks(books.params, books.prompt, ())
        while not alone.is_done:
            prefixes = [prefix_of(salt, [*books.prompt, *output]) for output in alone.outputs]
            logits = torch.stack([torch.from_numpy(self.weights.logits(prefix)) for prefix in prefixes])
            num_top = 2 * books.params.beam_width
            alone.advance([*Measured.from_logits(logits, logits.argmax(1), num_top).rows([num_top] * len(prefixes))])
        return alone

    # -------------------------------------------------------------------------------------------------- other moves

    def idle(self):
        """Idle time, as an engine has it between steps; sometimes all requests end before."""
        if self.rng.random() < 0.3:
            self.drain()
        for _ in range(self.rng.randint(1, 10)):
            if self.loop.reads is not None:
                self.loop.reads.finish_some()
            queued = len(self.engine.block_manager.copies)
            does_work = self.engine.use_idle_time(captures=True)
            check(len(self.engine.block_manager.copies) == queued, "idle work takes copies of the next batch")
            self.loop.seen["idle work"] += does_work
            self.loop.seen["idle beside queued copies"] += does_work and queued > 0
            self.loop.check()
            if not does_work:
                break

    def reset(self):
        self.engine.reset_prefix_cache()
        self.loop.check_forgotten()
        self.loop.check()

    def update(self):
        """New weights, by a call, or by the owner of a live module."""
        if self.engine.outputs:  # the next step is one of the engine's
            self.step()
        self.loop.update_weights()
        self.loop.num_steps_without_progress = 0
        if self.rng.random() < 0.5:
            self.engine.drop_computed()
            self.loop.check_forgotten()
            self.loop.check()
        else:
            self.engine.model_runner.binding.watch.has_changed = True
            self.step()

    def trouble_disk(self):
        if self.rng.random() < 0.1:
            self.disk.is_full = not self.disk.is_full
        else:
            damage(self.folder, self.rng)

    # ---------------------------------------------------------------------------------------------------- the end

    def moves(self):
        moves = {
            self.add: 30, self.step: 100, self.open_stream: 5, self.read_one: 8, self.drop_stream: 2, self.fork: 8,
            self.resume: 4, self.fail: 5, self.turn_non_finite: 3, self.abort: 4, self.loop.let_time_pass: 4,
            self.idle: 5, self.beam_search: 2,
        }  # fmt: skip
        if self.rng.random() < 0.6 - 0.3 * (self.loop.directory is not None):  # files are no longer used after a reset
            moves |= {self.reset: 1, self.update: 2}
        if self.engine.tiers is not None:
            moves |= {self.idle: 15, self.trouble_disk: 8}
        return moves

    def drain(self):
        """Run to the end of all requests; their steps are bounded."""
        limit = 4 * self.engine.config.max_model_len * (len(self.loop.unfinished) + 2)
        while self.engine.requests or self.engine.outputs:
            self.step()
            limit -= 1
            check(limit > 0, f"{len(self.loop.unfinished)} requests are starving")

    def run(self):
        moves = self.moves()
        for move in self.rng.choices(list(moves), list(moves.values()), k=NUM_CALLS):
            move()
        if self.rng.random() < 0.15:
            self.end_early()
            return self.figures()
        self.drain()
        for call in self.streams:
            while hasattr(call.stream, "close"):
                self.read(call)
        self.drain()
        self.loop.check_outputs()
        self.check_calls()
        check(not self.engine._in_flight, "something is left to do behind the end")
        self.loop.check_empty()
        if self.rng.random() < 0.2:
            self.reset()
        self.llm.close()
        return self.figures()

    def end_early(self):
        """Close the engine while requests run, at times after its device died."""
        if self.engine.requests and self.rng.random() < 0.5:
            error = RuntimeError("CUDA error: unspecified launch failure")
            self.faults.place = "forward"
            self.faults.error = error
            self.planted.append(error)
            while not self.engine.is_dead and self.engine.requests:
                self.step()
            self.loop.seen["deaths"] += self.engine.is_dead
        self.loop.seen["closed early"] += 1
        streams = self.streams
        self.llm.close()
        check(not self.engine.requests and not self.engine.outputs, "a closed engine has requests")
        for call in streams:
            with suppress(EngineClosedError, EngineDeadError):
                check(all(output.outputs for output in call.stream), "a stream goes on")

    def check_calls(self):
        """Check that every request ended once, for its caller too, with the tokens and the text of its sequences."""
        for name, call in self.calls.items():
            ended = [output for output in call.outputs if output.finished]
            check(len(ended) == 1 or call.stream is not None, f"request {name} ended {len(ended)} times")
            check(not ended or ended == call.outputs[-1:], f"request {name} has outputs after its end")
            for sequence in self.loop.sequences:
                if ended and sequence.request_id == ended[0].request_id:
                    self.check_sample(call, sequence)
        for processor in self.processors:
            check(not processor.error, processor.error)

    def check_sample(self, call, sequence):
        parts = [completion for out in call.outputs for completion in out.outputs if completion.index == sequence.index]
        right = sequence.output_token_ids
        given = [part.token_ids for part in parts]
        text = parts[-1].text
        if call.is_delta:
            given = [[token_id for tokens in given for token_id in tokens]]
            text = "".join(part.text for part in parts)
        is_right = given[-1] == right and all(right[: len(tokens)] == tokens for tokens in given)
        is_right &= parts[-1].finish_reason == sequence.finish_reason
        check(is_right, f"{sequence} has {given} for its caller, not {right}")
        stop = sequence.stop_reason if isinstance(sequence.stop_reason, str) else ""
        check(text == text_of(right).removesuffix(stop) or sequence.params.embeds, f"{sequence} has the text {text}")

    def figures(self):
        """What the walk met: `EngineLoop.seen`, the engine's own counters, and ends of requests."""
        stats = self.engine.stats()
        met = self.loop.seen
        for part in (stats, stats.tiers, stats.speculation):
            for name, value in ({} if part is None else asdict(part)).items():
                met[name] += isinstance(value, int) and value
        met["goals"] += stats.budget is not None
        met["samples"] += self.loop.model.num_forked
        met["states"] += bool(self.loop.model.states)
        met["blocks shared within a step"] += self.loop.model.num_shared_in_step
        met["files given up"] += getattr(self.loop.directory, "error", None) is not None
        met.update(f"ends by {sequence.finish_reason}" for sequence in self.loop.sequences)
        return met


def engine_options(rng, sizes, folder, policies):
    options = sizes.limits | {
        "block_size": sizes.block_size, "num_kv_blocks": sizes.num_blocks[0], "overlap": rng.random() < 0.6,
        "max_queue": rng.choice((None, None, 3)), "seed": rng.randrange(3), "enable_prefix_caching": rng.random() < 0.9,
    }  # fmt: skip
    if policies:
        options |= {"client_weights": None, "policies": policies}
    if rng.random() < 0.5 and sizes.limits["max_num_seqs"] > 1:
        options["speculation"] = "suffix" if rng.random() < 0.3 else Drafts(rng, share_right=rng.choice(SHARES))
    if rng.random() < 0.5:
        options["enable_prefix_caching"] = True
        most = max(16 * sizes.block_size * count for count in sizes.num_blocks)
        options["prefix_cache_host_bytes"] = rng.choice((None, most, 4 * most))
        if rng.random() < 0.7:
            options |= {"prefix_cache_dir": str(folder), "prefix_cache_dir_bytes": rng.choice((5000, 20000, 2**20))}
    return {name: value for name, value in options.items() if value is not None}


def walk(seed, *, policies=None):
    """Walk with one or two engines on one folder; returns what they met."""
    rng = random.Random(seed)
    sizes = Sizes.drawn(rng)
    clock = Clock()
    disk = Disk()
    weights = Weights()
    met = Counter[str]()
    threads = threading.enumerate()
    with tempfile.TemporaryDirectory() as folder, mocked(sizes, clock, disk, weights):
        options = engine_options(rng, sizes, Path(folder), policies)
        for _ in range(1 + ("prefix_cache_dir" in options)):
            life = Walk(rng, sizes, Path(folder), (weights, clock, disk), options)
            try:
                met += life.run()
            finally:
                life.llm.close()
            disk.is_full = False
        check({*threading.enumerate()} <= {*threads}, "a thread is left")
        files = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        check(folder not in str(files), f"files are left open: {files}")
    return met


def main():
    """Walk until so many steps ran, or the time is over; prints the seed of each walk that breaks an invariant."""
    parser = argparse.ArgumentParser(description="Walks of an engine over a mock device that check every invariant.")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of all walks")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time; --seed goes on")
    parser.add_argument("--seed", type=int, default=0, help="of the first walk")
    options = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    seed = options.seed
    num_broken = 0
    met = Counter[str]()
    end = time.monotonic() + options.seconds
    while met["num_steps"] < options.steps and time.monotonic() < end:
        try:
            met += walk(seed)
        except Exception:
            num_broken += 1
            print(f"seed {seed}:\n{traceback.format_exc()}", flush=True)
        seed += 1
    print(f"{met['num_steps']} steps, seeds {options.seed} to {seed - 1}, {num_broken} broken; {dict(met)}")
    return num_broken > 0


if __name__ == "__main__":
    sys.exit(main())
