"""Where measured trainings run: the options that `tide parity` and `tide reproduce` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchtitan_tide.check import ranks_per_machine
from torchtitan_tide.errors import ConfigError
from torchtitan_tide.measure.launch import HERE, Launcher, TemplateLauncher
from torchtitan_tide.measure.session import Session


@dataclass(frozen=True)
class LaunchOptions:
    """Where trainings run."""

    ranks: int = 0
    """Ranks a machine; 0: one a GPU, 4 without GPUs."""
    machines: int = 1
    """Machines that take part in each training."""
    launcher: str = ""
    """Command that starts a training on all machines, with {entry}, and if needed {python}, {ranks}, {port}; "": torchrun."""
    node_rank: int = -1
    """Number of this machine, where this same command is started once on each of several machines."""
    master_addr: str = ""
    """Address of machine 0, where this command is started on each machine."""
    master_port: int = 29500
    """First of some 200 free ports there."""
    limit_s: float = 3600.0
    """Longest time a training may take, in seconds."""

    @property
    def ranks_here(self) -> int:
        """Ranks a machine. Raises `ConfigError`."""
        if self.ranks < 0:
            raise ConfigError(f"--ranks {self.ranks}: takes a whole number >= 1, or 0 for one a GPU")
        return self.ranks or ranks_per_machine()

    @property
    def world_size(self) -> int:
        """Ranks of a training. Raises `ConfigError`."""
        if self.machines < 1:
            raise ConfigError(f"--machines {self.machines}: takes a whole number >= 1")
        return self.ranks_here * self.machines

    def start(self) -> Launcher:
        """The launcher; waits for the other machines where this is one of several. Raises `ConfigError`."""
        if self.limit_s <= 0:
            raise ConfigError(f"--limit-s {self.limit_s:g}: takes a number of seconds above 0")
        if self.launcher or self.machines == 1:
            return TemplateLauncher(self.ranks_here, self.launcher or HERE)
        if not 0 <= self.node_rank < self.machines or not self.master_addr:
            raise ConfigError(
                f"--machines {self.machines}: needs a --launcher that starts all of them, or --node-rank 0 to {self.machines - 1} "
                "and --master-addr, with the same command started on each machine"
            )
        from torchtitan_tide.measure.nodes import NodesLauncher

        return NodesLauncher(self.ranks_here, self.machines, self.node_rank, self.master_addr, self.master_port)

    def session(self, folder: Path, launcher: Launcher) -> Session:
        """A session in `folder`. What was run with another number of ranks or machines does not count there."""
        return Session(folder, launcher, f"{self.machines} x {self.ranks_here}", self.limit_s)
