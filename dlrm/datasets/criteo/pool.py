"""Worker processes that compute one task at a time, in order, and never outlive their parent.

A worker is a fresh interpreter that reads pickled tasks from its standard input. So it works from
scripts without a main guard and from notebooks, copies nothing of a parent with torch loaded, and
ends at once when the parent does (its input closes), even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from dlrm.errors import InputError

T = TypeVar("T")
R = TypeVar("R")

_BOOT = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from dlrm.datasets.criteo.pool import serve; serve()"
)


class WorkerDied(RuntimeError):
    """A worker process ended before its task did: out of memory, or killed."""


class Pool:
    """`workers` processes; with 1, everything runs in this process.

    >>> with Pool(1) as pool:
    ...     list(pool.imap(abs, [-1, 2]))
    [1, 2]
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._all: list[subprocess.Popen[bytes]] = []
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._all:
            worker.kill()
        if self._threads:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe:
                    with contextlib.suppress(OSError):  # the rest of a task that nobody reads
                        pipe.close()
        self._all.clear()

    def imap(
        self, function: Callable[[T], R], tasks: Iterable[T], ahead: int | None = None
    ) -> Iterator[R]:
        """The results of a module-level function, in the order of the tasks.

        At most `ahead` tasks (default: one more than there are workers) are taken from `tasks`
        before their results are. An error in a task is raised here.
        """
        if self.workers == 1:
            for task in tasks:
                yield function(task)
            return
        if self._threads is None:
            self._start()
        assert self._threads is not None
        ahead = ahead or self.workers + 1
        pending: deque[Future[R]] = deque()
        for task in tasks:
            pending.append(self._threads.submit(self._call, function, task))
            del task  # a task may hold much text
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _start(self) -> None:
        for _ in range(self.workers):
            worker = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # it would hold memory per core
            )
            self._all.append(worker)
            _send(worker, list(sys.path))
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(self.workers)

    def _call(self, function: Callable[[T], R], task: T) -> R:
        worker = self._idle.get()
        try:
            assert worker.stdout is not None
            _send(worker, (function, task))
            fine, result = pickle.load(worker.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise WorkerDied(
                "a worker process died, perhaps for lack of memory. The same command goes on where "
                "it stopped; --workers 1 needs the least memory"
            ) from None
        finally:
            self._idle.put(worker)
        if not fine:
            raise result
        return result


def _send(worker: subprocess.Popen[bytes], message: object) -> None:
    assert worker.stdin is not None
    pickle.dump(message, worker.stdin, protocol=5)
    worker.stdin.flush()


def serve() -> None:
    """The main loop of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not garble the answers
    tasks: queue.SimpleQueue[tuple[Callable[[Any], Any], Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    while True:
        function, task = tasks.get()
        answer: tuple[bool, Any]
        try:
            answer = (True, function(task))
        except (InputError, OSError) as error:
            answer = (False, error)
        except BaseException:
            answer = (False, RuntimeError(f"in a worker process:\n{traceback.format_exc()}"))
        del task
        pickle.dump(answer, sink, protocol=5)
        del answer
        sink.flush()


def _listen(tasks: queue.SimpleQueue[tuple[Callable[[Any], Any], Any]]) -> None:
    try:
        while True:
            tasks.put(pickle.load(sys.stdin.buffer))
    except BaseException:  # the parent is gone
        os._exit(1)
