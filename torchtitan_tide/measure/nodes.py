"""Measured trainings over several machines, where the same command is started once on each.

Machine 0 leads: it announces each training over a TCP store, all machines start torchrun for it, and the others answer with their exit
code. They need no common folder, nor to know what has been run before.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from torchtitan_tide.errors import ConfigError
from torchtitan_tide.measure.launch import PORTS, run_logged

PATIENCE_S = 60.0
"""After its own end, or the time limit, a training may take so much longer on other machines."""
START_S = 1800.0
"""Machines may come up at different times."""

Run = Callable[[Sequence[str], Path, float], int]


class NodesLauncher:
    """This machine's part: `run` on machine 0, `follow` on the others. `run_one` is for tests.

    The store listens on `port` of machine 0, each training's rendezvous on one of the ports above it. Raises `ConfigError` where the
    machines do not find each other.
    """

    def __init__(
        self, ranks: int, machines: int, node_rank: int, address: str, port: int, run_one: Run = run_logged
    ) -> None:
        from torch.distributed import DistError, TCPStore

        self.ranks, self.machines, self.node_rank, self.address, self.port = ranks, machines, node_rank, address, port
        self._run_one, self._count = run_one, 0
        try:
            self._store = TCPStore(
                address,
                port,
                machines,
                is_master=node_rank == 0,
                timeout=timedelta(seconds=START_S),
                wait_for_workers=True,
            )
        except (DistError, RuntimeError) as error:
            raise ConfigError(
                f"--master-addr {address} --master-port {port}: the machines do not meet: {error}"
            ) from None

    def command(self, arguments: Sequence[str]) -> list[str]:
        """torchrun's, of this machine."""
        from torchtitan_tide.measure.entry import MODULE

        port = self.port + 1 + self._count % PORTS
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.machines)]
        words += ["--node-rank", str(self.node_rank), "--master-addr", self.address, "--master-port", str(port)]
        words += ["--nproc-per-node", str(self.ranks), "--role", "rank", "--redirects", "0", "--tee", "3"]
        return [*words, "-m", MODULE, *arguments]

    def run(self, arguments: Sequence[str], log: Path, limit_s: float) -> int:
        """Machine 0: run a training everywhere. Exit code: its own, or if that is 0 the first other one's that is not.

        Raises `ConfigError` when a machine does not answer, because later trainings could not run either.
        """
        self._store.set(f"order/{self._count}", json.dumps({"arguments": list(arguments), "limit_s": limit_s}))
        code = self._run_one(self.command(arguments), log, limit_s)
        for machine in range(1, self.machines):
            key = f"answer/{self._count}/{machine}"
            try:
                self._store.wait([key], timedelta(seconds=PATIENCE_S if code == 0 else limit_s + PATIENCE_S))
            except RuntimeError:
                raise ConfigError(
                    f"machine {machine} has not answered: is the same command still running there?"
                ) from None
            code = code or int(self._store.get(key))
        self._count += 1
        return code

    def follow(self, tell: Callable[[str], None]) -> int:
        """The other machines: run what machine 0 announces until it closes. Exit code 0."""
        with tempfile.TemporaryDirectory() as folder:
            while True:
                key = f"order/{self._count}"
                try:
                    self._store.wait([key], timedelta(days=7))
                    order = json.loads(self._store.get(key))
                except RuntimeError:
                    raise ConfigError("machine 0 has gone: its output says why") from None
                if order is None:
                    self._store.set(f"answer/{self._count}/{self.node_rank}", "0")
                    return 0
                tell(f"training {self._count + 1}: running")
                log = Path(folder) / "log"
                code = self._run_one(self.command(order["arguments"]), log, order["limit_s"])
                if code:
                    tell(
                        f"training {self._count + 1}: exit code {code}; the end of its log here:\n{log.read_text()[-2000:]}"
                    )
                self._store.set(f"answer/{self._count}/{self.node_rank}", str(code))
                self._count += 1

    def close(self) -> None:
        """Machine 0: let the others end; the store stays until they have heard it."""
        if self.node_rank != 0:
            return
        self._store.set(f"order/{self._count}", json.dumps(None))
        keys = [f"answer/{self._count}/{machine}" for machine in range(1, self.machines)]
        try:
            self._store.wait(keys, timedelta(seconds=10))
        except RuntimeError:
            pass  # gone already: then there is nobody to tell
