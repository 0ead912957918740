"""A running cluster on this machine: the controller in this process, a process for each node and each engine.

    async with Cluster.start(config, on_record) as cluster:
        answer = await cluster.submit(request).answer()

Leaving the block ends every process; nothing stays behind, however it is left. Two clusters may run in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from dualpath.cluster.controller import Controller
from dualpath.cluster.launch import Child
from dualpath.cluster.live import Handle
from dualpath.cluster.messages import (
    Command,
    Counters,
    EngineBoot,
    Failed,
    Fetch,
    Hello,
    Link,
    MeasureCompute,
    Measured,
    NodeBoot,
    Report,
    ReportCounters,
    Stop,
)
from dualpath.cluster.meter import Meter
from dualpath.cluster.model import ServedModel, check_memory
from dualpath.cluster.profile import Profile
from dualpath.cluster.topology import expected_reads, link_rates, read_links, scheduler_constants, write_links
from dualpath.config import ClusterConfig
from dualpath.metrics.schema import RequestRecord
from dualpath.node.staging import staging_slots
from dualpath.scheduler.policy import POLICIES
from dualpath.store.root import StoreRoot
from dualpath.transfer.links import LinkCount, LinkTable
from dualpath.types import BadInputError, DualPathError, EngineId, LinkId, NodeId, Request, RequestId, Role

T = TypeVar("T")


class ClusterError(DualPathError):
    """The cluster cannot go on: a process is gone or could not start."""


class Cluster:
    """Use `Cluster.start`."""

    def __init__(
        self, config: ClusterConfig, model: ServedModel, profile: Profile | None, store: StoreRoot, links: LinkTable
    ) -> None:
        self.config, self.model, self._profile = config, model, profile
        self._store, self._links = store, links
        self._rates = link_rates(config)
        self._context = zmq.asyncio.Context()
        self._router: Any = self._context.socket(zmq.ROUTER)
        self._public, self._secret = zmq.curve_keypair()
        self._allowed: set[bytes] = set()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._children: dict[str, Child] = {}
        self._outbox: asyncio.Queue[tuple[str, Command]] = asyncio.Queue()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._counters: dict[str, asyncio.Future[Counters]] = {}
        self._counting = asyncio.Lock()
        self._measured: dict[EngineId, asyncio.Future[Measured]] = {}
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self.controller: Controller

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls,
        config: ClusterConfig,
        on_record: Callable[[RequestRecord], None] = lambda record: None,
        profile: Profile | None = None,
    ) -> AsyncIterator[Cluster]:
        """Brings the cluster of `config` up; `on_record` gets the record of each request when it is through. Without a
        `profile` of the machine engines are given all that waits, and batches have no quota of time.

        Raises BadInputError for a model or a store that cannot be used and for a cluster that this machine cannot
        hold, ClusterError when a process does not come up."""
        model = await asyncio.to_thread(ServedModel.open, config)
        check_memory(config, model)
        slots = {node.name: staging_slots(node, model.layout) for node in config.node}
        # The engines would refuse pools that hold nothing, too, but only after the store has been made.
        config.prefill.pool_tokens(model.layout, POLICIES[config.policy].layers_in_flight(model.layout.n_layer))
        config.decode.pool_blocks(model.layout)
        store_root = Path(config.store.root)
        writers = len(config.nodes(Role.DECODE))
        with (
            StoreRoot.open(
                store_root, model.fingerprint, config.store.capacity, config.store.segment, writers
            ) as store,
            contextlib.closing(LinkTable.create(link_rates(config))) as links,
        ):
            cluster = cls(config, model, profile, store, links)
            up = graceful = False
            try:
                await cluster._start(slots, on_record)
                up = True
                yield cluster
                graceful = True
            finally:
                await _to_the_end(cluster._stop(config.deadlines.stop if graceful else 0.0))
                if not up:
                    store.abandon()

    # --- Serving ----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        """Sends a request in. Raises DualPathError when it can never be served, ClusterError when the cluster is
        broken."""
        if self._broken.done():
            self._broken.result()
        for token in (*request.prompt, *request.forced):
            if not 0 <= token < self.model.vocab:
                raise DualPathError(f"request {request.id}: token id {token} is outside [0, {self.model.vocab})")
        with self._guarded("a request"):
            handle = self.controller.submit(request)
        self._changed()
        return handle

    def cancel(self, request: RequestId) -> None:
        """Stops a request wherever it is; its handle ends at once."""
        with self._guarded("a cancellation"):
            self.controller.cancel(request)
        self._changed()

    async def drain(self) -> None:
        """Waits until every request has given back what it held and every write is done. Raises ClusterError."""
        while not self.controller.idle:
            self._idle.clear()
            idle = asyncio.ensure_future(self._idle.wait())
            await _first(idle, self._broken)
            idle.cancel()
            if self._broken.done():
                self._broken.result()

    async def counters(self) -> dict[str, Counters]:
        """Totals of every node and engine since the start."""
        loop = asyncio.get_running_loop()
        async with self._counting:
            self._counters = {name: loop.create_future() for name in self._children}
            for name in self._children:
                self._send(name, ReportCounters())
            values = await self._in_time(asyncio.gather(*self._counters.values()), self.config.deadlines.transfer)
            return dict(zip(self._counters, values, strict=True))

    async def measure(self, engine: EngineId, points: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        """Seconds that one layer's attention takes a prefill engine at each of `points`, (cached, new) tokens. The
        engine must have no work."""
        answer: asyncio.Future[Measured] = asyncio.get_running_loop().create_future()
        self._measured[engine] = answer
        self._send(engine, MeasureCompute(tuple(points)))
        return (await self._in_time(answer, self.config.deadlines.silence)).seconds

    def link_counts(self) -> dict[LinkId, LinkCount]:
        """Bytes and busy seconds of each link since the start."""
        return self._links.counts()

    @contextlib.asynccontextmanager
    async def metered(self) -> AsyncIterator[Meter]:
        """Measures CPU and memory of all processes."""
        meter = Meter([child.process.pid for child in self._children.values()])
        try:
            yield meter
        finally:
            await meter.close()

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each node and engine."""
        return {name: child.process.pid for name, child in self._children.items()}

    # --- Coming up --------------------------------------------------------------------------------------------

    async def _start(self, slots: Mapping[NodeId, tuple[int, int]], on_record: Callable[[RequestRecord], None]) -> None:
        config, layout = self.config, self.model.layout
        endpoint = self._listen()
        loop = asyncio.get_running_loop()
        engines = {engine: node for node in config.node for engine in node.engine_ids}
        self.controller = Controller(
            config,
            layout,
            self._store.catalog,
            slots,
            self.model.max_context,
            expected_reads(config, layout, self._rates, self._profile).rates,
            scheduler_constants(config, layout, self._profile),
            self._send,
            time.monotonic,
            on_record,
        )
        self._tasks += [asyncio.create_task(self._receive()), asyncio.create_task(self._deliver())]
        for name in (*slots, *engines):
            self._children[name] = await Child.spawn("engine" if name in engines else "node", name)
            self._waiting[name] = loop.create_future()
            self._tasks.append(asyncio.create_task(self._watch(self._children[name])))
        for node in config.node:
            boot = NodeBoot(
                node.name,
                config,
                layout,
                str(self._store.namespace_dir),
                self._store.segment_slots,
                self._rates,
                read_links(node),
                write_links(node),
                self._credentials(endpoint),
            )
            self._children[node.name].boot(boot, [self._links.fd])
        deadline = config.deadlines.start
        with contextlib.ExitStack() as received:
            arriving = (self._children[node.name].staging(received) for node in config.node)
            ready = await self._in_time(asyncio.gather(*arriving), deadline)
            staging = dict(zip((node.name for node in config.node), ready, strict=True))
            for engine, node in engines.items():
                self._boot_engine(engine, node.name, node.role, staging, endpoint)
        await self._in_time(asyncio.gather(*self._waiting.values()), deadline)

    def _boot_engine(
        self, engine: EngineId, node: NodeId, role: Role, staging: Mapping[NodeId, tuple[int, int]], endpoint: str
    ) -> None:
        """A decode engine sees its own node's staging memory, a prefill engine that of each decode node as well."""
        decode = [section.name for section in self.config.nodes(Role.DECODE)] if role is Role.PREFILL else []
        seen = [node, *decode]
        boot = EngineBoot(
            engine,
            role,
            self.config,
            self.model.layout,
            engine in self.controller.leaders,
            self._profile.attention if self._profile else None,
            str(self.model.directory),
            self._rates,
            {name: staging[name][0] for name in seen},
            self._credentials(endpoint),
        )
        self._children[engine].boot(boot, [self._links.fd, *(staging[name][1] for name in seen)])

    def _listen(self) -> str:
        """Opens the control socket on loopback; only peers with a key of ours get in (CURVE)."""
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self)
        self._router.setsockopt(zmq.CURVE_SERVER, True)
        self._router.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, True)
        self._router.setsockopt(zmq.LINGER, 0)
        # A ROUTER drops what exceeds its mark; grants bound what is under way, and none of it may be lost.
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.RCVHWM, 0)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        return f"tcp://127.0.0.1:{port}"

    def callback(self, domain: str, key: bytes) -> bool:
        """For the authenticator: may the peer with this public key connect?"""
        return key in self._allowed

    def _credentials(self, endpoint: str) -> Link:
        public, secret = zmq.curve_keypair()
        self._allowed.add(public)
        return Link(endpoint, self._public, public, secret)

    # --- Control messages ---------------------------------------------------------------------------------------

    def _send(self, name: str, command: Command) -> None:
        self._outbox.put_nowait((name, command))

    async def _deliver(self) -> None:
        while True:
            name, command = await self._outbox.get()
            with self._guarded(f"an order to {name}"):
                await self._router.send_multipart([name.encode(), msgspec.msgpack.encode(command)])

    async def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(Report)
        while True:
            identity, data = await self._router.recv_multipart()
            name = identity.decode()
            try:
                with self._guarded(f"a report of {name}"):
                    self._on_report(name, decoder.decode(data))
            except DualPathError as error:  # nobody asked for it who could be told
                self._break(error)

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """An exception in here leaves the controller's state in doubt: the cluster stops serving and says why. What
        the controller refuses on purpose (DualPathError) is only passed on."""
        try:
            yield
        except DualPathError:
            raise
        except Exception as error:
            self._break(ClusterError(f"the controller failed on {what}: {error!r}"))
            raise

    def _on_report(self, name: str, report: Report) -> None:
        match report:
            case Hello():
                _settle(self._waiting.get(name), None)
            case Failed(error=error, bad_input=bad_input):
                self._break(BadInputError(error) if bad_input else ClusterError(f"{name}: {error}"))
            case Counters():
                _settle(self._counters.get(name), report)
            case Measured():
                _settle(self._measured.get(name), report)
            case Fetch():
                self.controller.fetch(name)
                self._changed()
            case _:
                self.controller.handle(report)
                self._changed()

    def _changed(self) -> None:
        """The controller's state has changed: whoever drains looks again, and its next deadline wakes it even when no
        event does."""
        if self.controller.idle:
            self._idle.set()
        if self._timer is not None:
            self._timer.cancel()
        deadline = self.controller.deadline()
        if deadline is not None:
            delay = max(deadline - time.monotonic(), 0.0) + 0.001
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_deadline)

    def _on_deadline(self) -> None:
        try:
            with self._guarded("a deadline"):
                self.controller.advance()
        except DualPathError as error:
            self._break(error)
            return
        self._changed()

    # --- Going down -------------------------------------------------------------------------------------------

    async def _watch(self, child: Child) -> None:
        code = await child.process.wait()
        # What it had to say may still be in the control socket: its reason is better than its exit code.
        await asyncio.sleep(0.2)
        if not self._stopping:
            self._break(ClusterError(f"process {child.name} ended by itself (exit code {code})"))

    def _break(self, error: DualPathError) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)
            self._broken.exception()  # it is raised where somebody waits
            self.controller.fail_all(str(error))

    async def _in_time(self, work: asyncio.Future[T], deadline_s: float) -> T:
        """The result of `work`. Raises what broke the cluster meanwhile, or ClusterError past the deadline."""
        try:
            await _first(work, self._broken, timeout=deadline_s)
            if work.done() and work.exception() is not None:
                # A child that is gone shows in its start socket first; its own words are on their way.
                await _first(self._broken, timeout=1.0)
            if self._broken.done():
                self._broken.result()
            if not work.done():
                raise ClusterError(f"no answer from every process within {deadline_s:g} s")
            return work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _stop(self, grace_s: float) -> None:
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        if grace_s:
            for name in self._children:
                self._send(name, Stop())
        await asyncio.gather(*(child.end(grace_s) for child in self._children.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._authenticator.stop()
        self._context.destroy(linger=0)


def _settle(future: asyncio.Future[T] | None, value: T) -> None:
    """Gives `future` its value, unless nobody waits for it any more."""
    if future is not None and not future.done():
        future.set_result(value)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end even when the caller is cancelled meanwhile, once or often; then the caller is."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                break
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()


async def _first(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Waits until one of `futures` is done, or for `timeout` seconds; none is cancelled."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
