"""One log a node instead of one a rank: for jobs of many ranks, where a file for each would be a burden.

The ranks of a node send their frames over a Unix socket to the node's agent. It appends what came from all of them with
one `write()` to its own log, `<attempt>/n<node>/`, and acknowledges after that; so a step whose `AgentLog.append` has
returned is as safe as with a `RankLog`, whichever process dies.

Hello:    magic `RHAH` | 0 u32 | rank i32 | attempt u32
Reply:    attempt u32 | 0 u32, or bytes of an error message u32 | message
Request:  magic `RHAG` | payload bytes u32 | rank i32 | number u32 | frames
Reply:    number u32 | bytes of an error message u32 | message
"""

import contextlib
import errno
import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runhealth.storage.codec import Encoder, inner_frames, ranked_frame
from runhealth.storage.errors import CorruptDataError, StoreError
from runhealth.storage.frame import MAX_PAYLOAD_BYTES, FrameKind
from runhealth.storage.ranklog import SEGMENT_BYTES, RankLog
from runhealth.storage.records import Record

_REQUEST = struct.Struct("<4sIiI")
_REPLY = struct.Struct("<II")
_MAGIC = b"RHAG"
_HELLO = b"RHAH"
_LIVES = 1000  # of one node's agents in an attempt: each takes the next number, for a log is never reopened
_RECEIVE_BYTES = 1 << 18
_PROBE_S = 2.0  # in which an agent that listens takes a connection
_SCHEMAS_KEPT = 512  # of one rank; a rank with more of them announces them again


class NodeLog(RankLog):
    """The log of an agent. Use `NodeLog.open`; `append_ranked` takes frames of any rank of the attempt."""

    _format_version = 2

    @classmethod
    def open(
        cls, attempt_dir: str, node: int, *, fsync: Literal["background", "step"] = "background",
        segment_bytes: int = SEGMENT_BYTES, clock: Callable[[], int] = time.time_ns,
    ) -> "NodeLog":  # fmt: skip
        """Claim `<attempt_dir>/n<node>`. Raises StoreError if it is claimed or cannot be written."""
        return cls._claim(attempt_dir, f"n{node:05d}", -1, fsync=fsync, segment_bytes=segment_bytes, clock=clock)

    @classmethod
    def open_next(
        cls, attempt_dir: str, node: int, *, fsync: Literal["background", "step"] = "background"
    ) -> "NodeLog":  # fmt: skip
        """Like `open` for an agent that may not be the first of its node in this attempt: node 3 takes n03000, then
        n03001 and so on. Raises StoreError."""
        for number in range(node * _LIVES, (node + 1) * _LIVES):
            if not Path(attempt_dir, f"n{number:05d}").exists():
                return cls.open(attempt_dir, number, fsync=fsync)
        raise StoreError(f"{_LIVES} agents of node {node} wrote to {attempt_dir} already")

    def _identity(self) -> Mapping[str, object]:
        return {"node": int(self._folder.name[1:])}

    @property
    def sequence(self) -> int:
        """Number of the segment that the next append goes to; it grows when that begins a new one."""
        full = self._fd < 0 or self._size >= self._segment_bytes
        return self._sequence + 1 if full else self._sequence

    def append_ranked(self, batches: Sequence[tuple[int, int, bytes]]) -> None:
        """Write (rank, connection, frames) with one `write()`. Raises StoreError."""
        with self._lock:
            if self._closed.is_set():
                raise StoreError(f"{self.path} is closed")
            if self._fd < 0 or self._size >= self._segment_bytes:
                self._rotate()
            now = self._clock()
            frames = [ranked_frame(rank, connection, data, now) for rank, connection, data in batches]
            self._write(b"".join(frames), frames)
            self._dirty = True
            if self._fsync == "step":
                self._flush(self._fd)


@dataclass(slots=True)
class _Client:
    """A connection: what arrived of the next request, what waits to be sent, and the schemas its rank announced."""

    socket: socket.socket
    number: int
    rank: int = -1
    attempt: int = -1  # until it has said whose it is
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    schemas: dict[bytes, None] = field(default_factory=dict)
    segment: int = -1  # of the log, in which all of `schemas` are known


class Agent:
    """Serves the ranks of one node until `close`, into the log of the attempt that each says it is of. Messages of a
    broken client end its connection, nobody else's.

    `open_log` opens the log of an attempt when its first rank comes; it raises StoreError.
    """

    def __init__(self, open_log: Callable[[int], NodeLog], socket_path: str) -> None:
        self._open_log = open_log
        self._logs: dict[int, NodeLog] = {}
        self.path = socket_path
        self.batches = 0  # that were acknowledged
        self.refused = 0  # connections that were ended because of what they sent
        self._connections = 0
        self._ranks: dict[tuple[int, int], _Client] = {}  # attempt, rank
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _make_room(socket_path)
            self._listener.bind(socket_path)
            self._inode = Path(socket_path).stat().st_ino
            self._listener.listen(1024)
        except OSError as err:
            self._listener.close()
            raise StoreError(f"cannot listen on {socket_path}: {err.strerror or err}") from err
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self, stop: threading.Event, poll_s: float = 0.2) -> None:
        """Take frames until `stop` is set."""
        while not stop.is_set():
            self.turn(poll_s)

    def turn(self, wait_s: float) -> None:
        """One round: read what every rank sent, write it to the log at once, acknowledge."""
        due: dict[int, list[tuple[_Client, int, bytes]]] = {}
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
                continue
            client: _Client = key.data
            if events & selectors.EVENT_WRITE:
                self._send(client)
            if events & selectors.EVENT_READ and (came := self._receive(client)):
                due.setdefault(client.attempt, []).extend(came)
        for attempt, batches in due.items():
            self._take(self._logs[attempt], batches)

    def close(self) -> None:
        """End all connections and the log."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Client):
                self._end(key.data)
        self._selector.close()
        self._listener.close()
        with contextlib.suppress(OSError):
            if Path(self.path).stat().st_ino == self._inode:  # not that of an agent that came later
                Path(self.path).unlink()
        for log in self._logs.values():
            log.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._connections += 1
            self._selector.register(connection, selectors.EVENT_READ, _Client(connection, self._connections))

    def _receive(self, client: _Client) -> list[tuple[_Client, int, bytes]]:
        try:
            data = client.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._end(client)
            return []
        client.incoming += data
        due = []
        while len(client.incoming) >= _REQUEST.size:
            magic, length, rank, number = _REQUEST.unpack_from(client.incoming)
            known = client.attempt >= 0
            if magic != (_MAGIC if known else _HELLO) or length > MAX_PAYLOAD_BYTES or (known and rank != client.rank):
                self.refused += 1
                self._end(client)
                return []
            end = _REQUEST.size + length
            if len(client.incoming) < end:
                break
            if known:
                due.append((client, number, bytes(client.incoming[_REQUEST.size : end])))
            else:
                self._greet(client, attempt=number, rank=rank)
            del client.incoming[:end]
        return due

    def _greet(self, client: _Client, *, attempt: int, rank: int) -> None:
        problem = ""
        try:
            if (attempt, rank) in self._ranks:
                raise StoreError(f"rank {rank} writes over another connection already")
            if attempt not in self._logs:
                self._logs[attempt] = self._open_log(attempt)
            client.attempt, client.rank = attempt, rank
            self._ranks[attempt, rank] = client
        except StoreError as err:
            problem = str(err)
        self._reply(client, attempt, problem)

    def _take(self, log: NodeLog, due: Sequence[tuple[_Client, int, bytes]]) -> None:
        segment = log.sequence
        batches: list[tuple[int, int, bytes]] = []
        sound: list[tuple[_Client, int]] = []
        for client, number, frames in due:
            rank = client.rank
            try:
                inner = inner_frames(frames)
            except CorruptDataError as err:
                self._reply(client, number, str(err))
                continue
            if client.segment != segment and client.schemas:
                batches.append((rank, client.number, b"".join(client.schemas)))
            client.segment = segment
            start = 0
            for frame in inner:
                if frame.kind == FrameKind.SCHEMA:
                    client.schemas[frames[start : frame.end]] = None
                start = frame.end
            batches.append((rank, client.number, frames))
            sound.append((client, number))
        problem = ""
        if batches:
            try:
                log.append_ranked(batches)
            except StoreError as err:
                problem = str(err)
        for client, number in sound:
            if problem:
                client.segment = -1  # what the log knows of its schemas is uncertain
            else:
                self.batches += 1
            self._reply(client, number, problem)
            if len(client.schemas) > _SCHEMAS_KEPT:
                self._end(client)

    def _reply(self, client: _Client, number: int, problem: str) -> None:
        text = problem.encode()
        client.outgoing += _REPLY.pack(number, len(text)) + text
        self._send(client)

    def _send(self, client: _Client) -> None:
        try:
            while client.outgoing:
                del client.outgoing[: client.socket.send(client.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._end(client)
            return
        if client.socket.fileno() >= 0:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outgoing else 0)
            self._selector.modify(client.socket, wanted, client)

    def _end(self, client: _Client) -> None:
        if self._ranks.get((client.attempt, client.rank)) is client:
            del self._ranks[client.attempt, client.rank]
        if client.socket.fileno() >= 0:
            self._selector.unregister(client.socket)
            client.socket.close()


class AgentGoneError(StoreError):
    """There is no connection to the agent, or it ended before the answer. `frames`, all of them or none, may be in the
    agent's log; they will not come there any more."""

    def __init__(self, message: str, frames: bytes) -> None:
        super().__init__(message)
        self.frames = frames


class AgentLog:
    """What a rank has in place of a `RankLog` where its node has an agent. Safe to use from several threads."""

    def __init__(self, socket_path: str, attempt: int, rank: int, *, timeout_s: float = 5.0) -> None:
        self.path = socket_path
        self.attempt = attempt
        self.rank = rank
        self._timeout_s = timeout_s
        self._encoder = Encoder()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._number = 0
        self._pid = os.getpid()
        self._connect()

    def append(self, records: Sequence[Record]) -> None:
        """Hand the records to the agent; when this returns they are in its log.

        Raises StoreError if they may not be: do not send them again. The next append connects anew.
        """
        if os.getpid() != self._pid:
            raise StoreError(f"{self.path} was opened by process {self._pid}, this is its forked child {os.getpid()}")
        for record in records:
            if record.attempt != self.attempt or record.rank != self.rank:
                raise StoreError(
                    f"this log takes records of attempt {self.attempt}, rank {self.rank}; "
                    f"met attempt {record.attempt}, rank {record.rank}"
                )
        with self._lock:
            try:
                connection = self._socket or self._connect()
            except StoreError as err:
                raise AgentGoneError(str(err), b"") from err
            frames = b"".join(self._encoder.encode(records))
            self._number = (self._number + 1) % 2**32
            try:
                problem = self._ask(connection, _REQUEST.pack(_MAGIC, len(frames), self.rank, self._number) + frames)
            except TimeoutError as err:
                raise StoreError(f"the agent at {self.path} did not answer; this step may be lost") from err
            except OSError as err:
                raise AgentGoneError(
                    f"the agent at {self.path} did not acknowledge: {err}; this step may be lost", frames
                ) from err
            if problem:
                self._disconnect()
                raise StoreError(f"the agent at {self.path} refused: {problem}")

    def _ask(self, connection: socket.socket, message: bytes) -> str:
        """The agent's answer to a message: empty, or why not. Disconnects where there is none, and raises OSError."""
        try:
            connection.sendall(message)
            number, length = _REPLY.unpack(_exactly(connection, _REPLY.size))
            problem = _exactly(connection, length).decode(errors="replace")
            if number != _REQUEST.unpack_from(message)[3]:
                raise ConnectionError("an answer out of turn")
        except OSError:
            self._disconnect()
            raise
        return problem

    def close(self) -> None:
        """Disconnect. Idempotent."""
        with self._lock:
            self._disconnect()

    def __enter__(self) -> "AgentLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self._timeout_s)
        try:
            connection.connect(self.path)
            self._socket = connection
            problem = self._ask(connection, _REQUEST.pack(_HELLO, 0, self.rank, self.attempt))
        except OSError as err:
            connection.close()
            self._socket = None
            raise StoreError(f"no agent answers at {self.path}: {err.strerror or err}") from err
        if problem:
            self._disconnect()
            raise StoreError(f"the agent at {self.path} refused: {problem}")
        return connection

    def _disconnect(self) -> None:
        self._encoder.forget()  # a new connection knows no schema
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _exactly(connection: socket.socket, count: int) -> bytes:
    """`count` bytes; a short answer is an error, never an acknowledgement."""
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return data


def _make_room(path: str) -> None:
    """Remove a socket that nobody listens on any more. Raises OSError for anything else that is there."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "expected a free path or an old socket, met something else; it was left alone")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
        except TimeoutError:
            pass  # it listens, but is busy or suspended
    raise OSError(errno.EADDRINUSE, "another agent listens there; end it first, or choose another socket")
