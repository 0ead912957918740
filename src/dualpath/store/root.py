"""A store root: one directory, one owner, one hard cap on everything in it.

`ROOT/<digest>/` is a namespace: `namespace.json` spells out the fingerprint that the digest names, beside it are the
segments. The owner serves one namespace; the others are idle and go, the longest unused first, when space is needed.
Opening reads the segments' tables, never the records, and leaves nothing behind when it fails.

After a restart LRU goes by the time of each block's write (its table entry has it): uses since then are not on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from dualpath.layout import ModelFingerprint
from dualpath.store.catalog import Catalog
from dualpath.store.format import FORMAT_VERSION, ROOT_OVERHEAD, Geometry, newer_format
from dualpath.store.lock import LOCK_NAME, lock_owner
from dualpath.store.scan import NamespaceScan, SegmentScan, clean, gather, scan_namespace
from dualpath.types import BadInputError

NAMESPACE_FILE = "namespace.json"
_DIGEST = re.compile(r"[0-9a-f]{32}")


class NamespaceFile(msgspec.Struct, frozen=True):
    """Content of `namespace.json`."""

    format: int
    fingerprint: ModelFingerprint


class Space:
    """The capacity: what is taken, and what can be freed for it."""

    def __init__(self, capacity: int, taken: int, idle: Sequence[Path]) -> None:
        """`taken`: bytes of all that is there. `idle`: namespaces that may be removed, in this order."""
        self.capacity = capacity
        self.taken = taken
        self._idle = list(idle)

    def reserve(self, nbytes: int) -> bool:
        """Takes `nbytes` of the capacity, if need be by removing idle namespaces; False when there is no room."""
        while self.taken + nbytes > self.capacity and self._idle:
            path = self._idle.pop(0)
            before = disk_usage(path)
            shutil.rmtree(path, ignore_errors=True)
            self.taken -= before - disk_usage(path)
        if self.taken + nbytes > self.capacity:
            return False
        self.taken += nbytes
        return True


class StoreRoot:
    """An open root and its catalog. Made by `open`; a context manager."""

    def __init__(
        self, namespace_dir: Path, catalog: Catalog, segment_slots: int, lock: int, undo: contextlib.ExitStack
    ) -> None:
        self.namespace_dir = namespace_dir
        self.catalog = catalog
        self.segment_slots = segment_slots
        """Records in a new segment: what `RecordWriter` takes."""
        self._lock = lock
        self._undo = undo

    @classmethod
    def open(cls, root: Path, fingerprint: ModelFingerprint, capacity: int, segment: int, writers: int) -> StoreRoot:
        """Takes ownership of `root` (made if it is not there) and opens the fingerprint's namespace.

        `capacity`: bytes, the cap on all files below `root`. `segment`: bytes of a segment file at most. `writers`:
        nodes that write. Raises BadInputError for a root that cannot be used or belongs to a live process, a
        namespace that contradicts its digest, a newer format, and a block that does not fit."""
        geometry = Geometry.fit(fingerprint.layout, segment, capacity, writers)
        with contextlib.ExitStack() as undo:
            try:
                fresh = _make_root(root, undo)
                lock = lock_owner(root)
                undo.callback(os.close, lock)
                if fresh:  # removed with the lock still held: nobody else's file
                    undo.callback((root / LOCK_NAME).unlink, missing_ok=True)
                return cls._open(root, fingerprint, capacity, geometry, lock, undo)
            except OSError as error:
                raise BadInputError(f"store root {root} cannot be used: {error.strerror or error}") from error

    @classmethod
    def _open(
        cls,
        root: Path,
        fingerprint: ModelFingerprint,
        capacity: int,
        geometry: Geometry,
        lock: int,
        undo: contextlib.ExitStack,
    ) -> StoreRoot:
        directory = root / fingerprint.digest()
        _make_namespace(directory, fingerprint, undo)
        scan = scan_namespace(directory)
        clean(scan)
        own = sum(s.path.stat().st_blocks * 512 for s in scan.segments)
        reserved = sum(s.geometry.reserved_bytes for s in scan.segments)
        idle = sorted((p for p in namespace_dirs(root) if p != directory), key=_last_use)
        space = Space(capacity, disk_usage(root) - own + reserved + ROOT_OVERHEAD, idle)
        kept, evicted = _shrink(scan, space)
        catalog = Catalog(
            geometry.slots,
            lambda: space.reserve(geometry.reserved_bytes),
            max_segments=capacity // geometry.reserved_bytes,
            stored=gather(kept, scan.leftovers, evicted),
        )
        os.utime(directory / NAMESPACE_FILE)
        return cls(directory, catalog, geometry.slots, lock, undo.pop_all())

    def abandon(self) -> None:
        """Gives up a root that was opened and not used: what opening made is removed again, if nothing was added."""
        if self._lock >= 0:
            self._lock = -1
            self._undo.close()

    def close(self) -> None:
        """Gives the root up. Its files stay."""
        if self._lock >= 0:
            with contextlib.suppress(FileNotFoundError):  # somebody removed the root: nothing to date
                os.utime(self.namespace_dir / NAMESPACE_FILE)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> StoreRoot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def namespace_dirs(root: Path) -> list[Path]:
    """The namespaces below a root, by name. Nothing else below it is ever removed."""
    return sorted(path for path in root.iterdir() if _DIGEST.fullmatch(path.name) and path.is_dir())


def read_namespace_file(directory: Path) -> NamespaceFile | None:
    """What `namespace.json` says; None when there is none yet. Raises BadInputError when it contradicts the
    directory's name, cannot be read, or is of a newer release."""
    path = directory / NAMESPACE_FILE
    try:
        data = json.loads(path.read_bytes())
        version = data["format"]
        if version > FORMAT_VERSION:
            raise newer_format(f"namespace {directory.name}", version)
        content = msgspec.convert(data, NamespaceFile)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise BadInputError(f"{path} is damaged ({error}): remove {directory}") from None
    if content.fingerprint.digest() != directory.name:
        raise BadInputError(
            f"{path} describes namespace {content.fingerprint.digest()}, not {directory.name}: remove {directory}"
        )
    return content


def disk_usage(path: Path) -> int:
    """Bytes that `path` and all below it take on disk, as `du` counts."""
    try:
        total = path.lstat().st_blocks * 512
        if path.is_dir() and not path.is_symlink():
            total += sum(disk_usage(below) for below in path.iterdir())
    except FileNotFoundError:
        return 0
    return total


def _make_root(root: Path, undo: contextlib.ExitStack) -> bool:
    """Makes the directory if it is not there. True: it has no lock file yet."""
    if root.exists() and not root.is_dir():
        raise BadInputError(f"store root {root} is a file, a directory is needed")
    for path in reversed(list(_missing(root))):
        path.mkdir(0o700)
        undo.callback(_remove_directory, path)
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        raise BadInputError(f"store root {root} is not writable: change its permissions or use another root")
    if (root / LOCK_NAME).exists():
        return False
    if stranger := next(root.iterdir(), None):
        raise BadInputError(f"store root {root} holds {stranger.name!r} and is no store: use an empty directory")
    return True


def _make_namespace(directory: Path, fingerprint: ModelFingerprint, undo: contextlib.ExitStack) -> None:
    if not directory.exists():
        directory.mkdir(0o700)
        undo.callback(_remove_directory, directory)
    if read_namespace_file(directory) is None:
        data = {"format": FORMAT_VERSION, "fingerprint": fingerprint.spelled_out()}
        unfinished = directory / f"{NAMESPACE_FILE}.new"
        unfinished.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
        unfinished.rename(directory / NAMESPACE_FILE)
        undo.callback((directory / NAMESPACE_FILE).unlink, missing_ok=True)


def _shrink(scan: NamespaceScan, space: Space) -> tuple[list[SegmentScan], int]:
    """Brings a root that was larger before below its cap: idle namespaces go, then whole segments of our own, those
    first that were written to longest ago. Returns the segments that stay, and how many blocks went."""
    kept = sorted(scan.segments, key=lambda segment: segment.written_ns.max(initial=0), reverse=True)
    evicted = 0
    while not space.reserve(0) and kept:
        segment = kept.pop()
        segment.path.unlink()
        space.taken -= segment.geometry.reserved_bytes
        evicted += len(segment.slots)
    return sorted(kept, key=lambda segment: segment.number), evicted


def _missing(path: Path) -> Iterator[Path]:
    while not path.exists():
        yield path
        path = path.parent


def _last_use(directory: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return (directory / NAMESPACE_FILE).stat().st_mtime
    return 0.0


def _remove_directory(path: Path) -> None:
    with contextlib.suppress(OSError):  # not empty: somebody else put something there
        path.rmdir()
