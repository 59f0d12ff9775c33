"""Four processes that stay, joined by gloo, so that tests of several ranks start them once."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 4


def serve(rank: int, store: str, connection: Connection) -> None:
    """Run what comes, until nothing does."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=20)  # of a collective that another rank does not reach
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timeout)
    groups = {RANKS: None, 2: dist.new_group([2, 3], timeout=timeout)}  # whose ranks are not those of the world
    while task := pickle.loads(connection.recv_bytes()):
        ranks, function, arguments = task
        try:
            answer = True, function(groups[ranks], *arguments)
        except Exception:
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()


class Ranks:
    """``run`` calls a function of a module of the tests in the last processes, and returns what each gave."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "sparse_attn"])
        self.connections, self.processes = [], []
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, str(folder / "store"), there), daemon=True)
            process.start()
            self.connections.append(here)
            self.processes.append(process)

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        used = self.connections[-ranks:]
        for connection in used:
            connection.send_bytes(pickle.dumps((ranks, function, arguments)))
        answers = [pickle.loads(connection.recv_bytes()) for connection in used]
        for done, answer in answers:
            assert done, answer
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for connection in self.connections:
            connection.send_bytes(pickle.dumps(None))
        for process in self.processes:
            process.join(5)
            process.kill()  # one that waits for a rank that failed
