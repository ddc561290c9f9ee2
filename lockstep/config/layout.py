"""The layout: settings that affect the speed of a run and never a bit of its result."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Literal

from lockstep.config.launchers import OPTIONAL, PROCESSES, SPREAD, Launcher, advice_without, launcher_named
from lockstep.config.layout_text import AUTO, HELP, fields_of, processes_of, text_of
from lockstep.config.resources import Resources, of_role, validate_resources
from lockstep.config.settings import SettingsError, check_values

LOCAL = "local"
"""The device of torchrun's processes if each uses its own GPU."""
_FIXED = ("device", "graphs", "ipc", "replay", "pin", "nice", "restarts", "compress", "resources")
"""Options that only certain layouts have, so auto cannot take them."""


@dataclass(frozen=True)
class Layout:
    """The processes of a run and their shards and devices. On one kind of device, every layout gives the same bits."""

    launcher_name: str = "inline"
    """The launcher: a name in lockstep.config.launchers, or file.py:NAME for your own. auto means that
    lockstep.launchers.auto still has to choose a layout for the experiment and the machine."""
    workers: int = 1
    """Processes that collect and learn, each for a contiguous block of shards."""
    collectors: tuple[str, ...] = ()
    """Devices of processes that only collect, one each: cpu, or a number for a GPU."""
    learners: tuple[str, ...] = ()
    """Devices of processes that only learn."""
    copies: int = 1
    """Number of equal groups of collectors and learners, as in a0-l1,2,3-d2. A group's learners take the rollouts of
    its collectors. If torchrun or srun has started as many processes, each starts one group. Process i of a machine
    uses the GPUs of group i."""
    growing: bool = False
    """On Ray: whether the number of collectors is a minimum. More join as long as the cluster has room and there is a
    shard for each. Needs --scheme.lag async."""
    device: str = "cpu"
    """Devices of processes that collect and learn: cpu, the number of a GPU, or several numbers as in 0+1, each for a
    block of a machine's processes. Under torchrun also local: process i of a machine computes on GPU i."""
    env_threads: int = 1
    """Threads that step the environments of one shard (native adapters only)."""
    env_processes: int = 0
    """Processes of each collector that step its Python environments; 0 steps them in the collector itself."""
    pin: int = 0
    """1 pins every process, with its threads and children, to separate neighboring cores, so that its data stays in
    near caches and, on machines with several sockets, in near memory. For machines that run nothing else; 0 leaves
    placement to the system."""
    nice: int = 0
    """The niceness (0 to 19) of processes that only collect and of their threads and games, added to the run's. Higher
    yields more to learners: with 10, a learner gets a core at once when its work arrives. 0 treats all alike."""
    graphs: int = 0
    """1 makes GPUs run acting, the gradient of each slice and updates as CUDA graphs: one launch instead of one per
    kernel, which pays off for small kernels. It takes memory for each slot's rollout and for all intermediate results
    of a slice."""
    ipc: int = 1
    """1 lets processes of one machine read the memory of each other's GPUs (CUDA IPC), if the driver and the container
    allow it. Then gradients and parameters do not pass through the CPU's memory. Use 0 if that fails."""
    replay: Literal["auto", "gpu", "cpu"] = "auto"
    """Where learners on GPUs store replay. auto uses the GPU if replay takes at most half of its free memory, otherwise
    the CPU. On the GPU, a gradient step reads items directly; on the CPU, one thread reads them and they are copied."""
    stall_timeout: float = 300.0
    """Seconds without progress after which a run ends with an error. Higher tolerates longer pauses."""
    jitter: float = 0.0
    """Maximum number of seconds that every process sleeps, for a random time, at each of its steps. It tests whether
    and how timing affects the result."""
    learner_delay: float = 0.0
    """Seconds that learners sleep before each iteration, to simulate slower hardware."""
    restarts: int = 3
    """On Ray: the number of processes that a run may lose before it ends. More suit long runs on unreliable machines; 0
    ends the run at the first loss. With ray:a4+-l1, a lost collector counts only if fewer than 4 are left."""
    compress: int = 0
    """On Ray: 1 compresses rollouts that are sent to learners. It takes time on both sides and pays off with a slow
    network and image observations; 0 sends them uncompressed."""
    resources: Resources = ()
    """On Ray: the resources of each process of a role, as in learner.gpus=1, collector.cpus=2 or worker.NAME=1 for a
    resource that the cluster defines. With gpus, which may be a fraction, the role computes on a GPU. By default, a
    process takes one core per thread."""

    @staticmethod
    def parse(text: str) -> Layout:
        """Parse `auto`, `inline`, `processes:N`, `cpu:aC-lL`, `a0-l1,2,3-d2`, `ray:N`, `ray:aC-lL`,
        `ray:aC+-lL` or `torchrun`, each with options as in `processes:2,env_threads=2`.

        Raises:
            SettingsError: the text has none of these forms.
        """
        layout = Layout(**fields_of(text))
        layout.validate()
        return layout

    @staticmethod
    def of(given: Layout | str | None) -> Layout:
        """A layout from a layout or a text such as "processes:2"; None means auto."""
        if given is None:
            return Layout(AUTO)
        if not isinstance(given, (Layout, str)):
            raise SettingsError(f"{given!r} is not a layout. {HELP}")
        return Layout.parse(given) if isinstance(given, str) else given

    def __str__(self) -> str:
        return text_of(vars(self), vars(Layout()))

    @property
    def is_auto(self) -> bool:
        """Whether the layout is auto and still has to be chosen."""
        return self.launcher_name == AUTO

    @property
    def launcher(self) -> Launcher:
        """The launcher of the layout's processes.

        Raises:
            SettingsError: the layout is auto, or its launcher does not exist.
        """
        if self.is_auto:
            raise SettingsError(
                f"--layout {self} cannot be chosen here, since it depends on the machine that will run it. {HELP}"
            )
        return SPREAD if self.spread else launcher_named(self.launcher_name)

    @property
    def spread(self) -> bool:
        """Whether torchrun or srun has started processes, each of which starts one of the copies."""
        return self.copies > 1 and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1

    def device_of(self, role: Literal["collector", "learner"], index: int) -> str:
        """torch's name of the device of a process. index: its number among the processes of its role."""
        if self.resources_of(role).get("gpus"):
            return "cuda:0"  # Ray shows a process only its own GPUs
        if self.split:
            named = self.collectors if role == "collector" else self.learners
            device = self._of_group(named)[index % (len(named) // self.copies)] if self.spread else named[index]
        else:
            device = self._dealt(index)
        return device if device == "cpu" else f"cuda:{device}"

    def resources_of(self, role: Literal["collector", "learner"]) -> dict[str, float]:
        """Amounts by the names of a role's resources."""
        return of_role(self.resources, role if self.split else "worker")

    def _dealt(self, index: int) -> str:
        """The device of a process that collects and learns. Neighbors share a GPU."""
        processes, several = self.workers, self.device == LOCAL or "+" in self.device
        if several and self.launcher.started_externally:
            index, processes = _place_on_machine(index, processes)
        return self._share(index, processes)

    def _of_group(self, named: tuple[str, ...]) -> tuple[str, ...]:
        """The devices of the group that this process starts: process i of a machine starts group i."""
        each, place = len(named) // self.copies, int(os.environ.get("LOCAL_RANK", "0")) % self.copies
        return named[place * each : (place + 1) * each]

    def _share(self, index: int, processes: int) -> str:
        """The device of a process, where blocks of these processes share the devices."""
        devices = self.device.split("+")
        return str(index) if self.device == LOCAL else devices[index * len(devices) // processes]

    def learners_beside(self, index: int) -> int:
        """The number of learners that compute on the GPU of the learner with this number, itself included."""
        if gpus := self.resources_of("learner").get("gpus"):
            return math.ceil(1 / gpus)
        if self.spread:
            devices = self._of_group(self.learners)
            index %= len(devices)
        elif self.launcher.started_externally:
            index, processes = _place_on_machine(index, self.workers)
            devices = [self._share(each, processes) for each in range(processes)]
        else:
            devices = [self.device_of("learner", each) for each in range(self.learning)]
        return list(devices).count(devices[index])

    @property
    def gpus(self) -> tuple[int, ...]:
        """Numbers of all GPUs that the layout names on the machine of this process."""
        named = (*self.collectors, *self.learners, *(() if self.split else self.device.split("+")))
        if self.spread:
            named = (*self._of_group(self.collectors), *self._of_group(self.learners))
        resolved = [os.environ.get("LOCAL_RANK", "0") if device == LOCAL else device for device in named]
        return tuple(sorted({int(device) for device in resolved if device != "cpu"}))

    @property
    def split(self) -> bool:
        """Whether collectors and learners are separate processes."""
        return bool(self.collectors)

    def groups(self, shards: int) -> int:
        """The number of groups into which separate collectors divide the shards. A group moves as a whole from one
        collector to another, so if the number of collectors can change, each shard is a group."""
        return shards if self.growing else len(self.collectors)

    @property
    def collecting(self) -> int:
        """Processes that collect."""
        return len(self.collectors) or self.workers

    def environments_each(self, num_envs: int) -> int:
        """About how many of the environments each collecting process has."""
        return -(-num_envs // self.collecting)

    @property
    def learning(self) -> int:
        """Processes that learn."""
        return len(self.learners) or self.workers

    @property
    def processes(self) -> int:
        """Processes that this layout starts, without those that watch them."""
        return len(self.collectors) + len(self.learners) if self.split else self.workers

    @property
    def processes_here(self) -> int:
        """Processes that this layout starts on this machine, without those that watch them."""
        if not self.launcher.started_externally:
            return self.processes
        programs = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return programs * (self.processes // self.copies) if self.split else programs

    @property
    def uses_gpus(self) -> bool:
        """Whether any process computes on a GPU."""
        return "GPU" in self.kinds

    @property
    def opens_gpus(self) -> bool:
        """Whether processes of one machine may open the memory of each other's GPUs."""
        return bool(self.ipc) and self.uses_gpus

    @property
    def kinds(self) -> tuple[str, str]:
        """The kinds of devices, CPU or GPU, of collectors and of learners. Bits depend on them."""
        collecting, learning = (self.device_of(role, 0) for role in ("collector", "learner"))
        return "CPU" if collecting == "cpu" else "GPU", "CPU" if learning == "cpu" else "GPU"

    def repeating(self) -> Layout:
        """The smallest layout with the same kinds of devices, and so the same bits; auto if all of them are CPUs."""
        if not self.uses_gpus:
            return Layout(AUTO)
        collecting, learning = ("0" if kind == "GPU" else "cpu" for kind in self.kinds)
        if collecting == learning:
            return Layout(device=collecting)
        return Layout(PROCESSES, collectors=(collecting,), learners=(learning,))

    def anywhere(self) -> Layout:
        """The layout on the CPU. It can be checked here for a machine with other GPUs."""
        return dataclasses.replace(
            self,
            collectors=("cpu",) * len(self.collectors),
            learners=("cpu",) * len(self.learners),
            device="cpu",
            graphs=0,
            ipc=1,
            replay="auto",
            resources=(),
        )

    def validate(self) -> None:
        """Raise SettingsError for values out of range."""
        check_values(self)
        self._validate_numbers()
        if not self.is_auto:
            self._validate_devices()
            self._validate_processes()
        elif fixed := [name for name in _FIXED if getattr(self, name) != getattr(Layout, name)]:
            raise SettingsError(
                f"Layout {self}: auto chooses among layouts of this machine's CPU, so leave {fixed[0]}= out, or "
                f"name a layout. {HELP}"
            )

    def _validate_numbers(self) -> None:
        """Raise SettingsError for numbers that are out of range in every layout."""
        if self.copies < 1 or len(self.collectors) % self.copies or len(self.learners) % self.copies:
            raise SettingsError(
                f"Layout: copies={self.copies} must divide {len(self.collectors)} collectors and {len(self.learners)} "
                f"learners into equal groups. {HELP}"
            )
        if self.env_threads < 1 or not self.stall_timeout > 0:
            raise SettingsError(f"Layout {self}: env_threads and stall_timeout must be positive.")
        if not (self.env_processes >= 0 and 0 <= self.jitter < math.inf and 0 <= self.learner_delay < math.inf):
            raise SettingsError(f"Layout {self}: env_processes, jitter and learner_delay must not be negative.")
        if self.pin not in (0, 1):
            raise SettingsError(f"Layout {self}: pin must be 0 or 1.")
        if not 0 <= self.nice <= 19:
            raise SettingsError(f"Layout {self}: nice must be 0 to 19. 0 treats all processes alike.")

    def _validate_devices(self) -> None:
        """Raise SettingsError if the processes cannot have these devices or options of devices."""
        if self.graphs not in (0, 1) or (self.graphs and "CPU" in self.kinds):
            raise SettingsError(
                f"Layout {self}: graphs must be 0 or 1, and 1 needs GPUs for all processes, as in "
                "inline,device=0,graphs=1 or a0-l0,graphs=1."
            )
        if self.ipc not in (0, 1):
            raise SettingsError(f"Layout {self}: ipc must be 0 or 1.")
        if self.replay == "gpu" and self.kinds[1] == "CPU":
            raise SettingsError(
                f"Layout {self}: replay=gpu needs learners on GPUs, as in inline,device=0,replay=gpu. Leave it out."
            )
        if self.device != "cpu" and self.split:
            raise SettingsError(f"Layout {self} names its devices already, as in a0-l1: leave device= out.")
        self._validate_device()
        for role, named in (("collectors", self.collectors), ("learners", self.learners)):
            if "cpu" in named and set(named) != {"cpu"}:
                raise SettingsError(
                    f"Layout {self}: all {role} must compute on GPUs, or all on the CPU, since their bits differ. Use "
                    f"{dataclasses.replace(self, **{role: tuple(each for each in named if each != 'cpu')})} or "
                    f"{dataclasses.replace(self, **{role: ('cpu',) * len(named)})}."
                )

    def _validate_processes(self) -> None:
        """Raise SettingsError if the launcher does not start such processes, or does not support an option."""
        launcher = self.launcher
        if (
            self.workers < 1
            or bool(self.collectors) != bool(self.learners)
            or (self.split and not launcher.starts_processes)
            or (self.workers > 1 and launcher.one_process)
        ):
            apart = self.launcher_name == PROCESSES and (self.collectors or self.learners)
            raise SettingsError(f"Layout {self}: {processes_of('cpu' if apart else self.launcher_name)}")
        for option in OPTIONAL:
            supported = option in launcher.options and (option != "nice" or self.split)
            if getattr(self, option) != getattr(Layout, option) and not supported:
                raise SettingsError(f"Layout {self}: {advice_without(option)}")
        validate_resources(self.resources, ("collector", "learner") if self.split else ("worker",), str(self))
        if self.restarts < 0 or self.compress not in (0, 1):
            raise SettingsError(f"Layout {self}: restarts must be at least 0, and compress 0 or 1.")

    def _validate_device(self) -> None:
        """Raise SettingsError if `device` does not fit the processes that collect and learn."""
        several, external = self.device.split("+"), self.launcher.started_externally
        if self.device == LOCAL and not external:
            raise SettingsError(
                f"Layout {self}: device=local is for torchrun. Here, device=0+1 deals the processes to GPUs 0 and 1."
            )
        if self.device not in ("cpu", LOCAL) and not all(device.isdecimal() for device in several):
            raise SettingsError(
                f"Layout {self}: device={self.device} must be cpu, or the number of a GPU, or several as in "
                "device=0+1, or local under torchrun."
            )
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", len(several))) if external else self.workers
        if len(several) > max(1, processes):  # a lack of processes is reported elsewhere
            raise SettingsError(
                f"Layout {self} names {len(several)} GPUs for {processes} process{'es' * (processes > 1)}, and each "
                f"process computes on one. Start {len(several)} or more processes, or name fewer GPUs."
            )


def _place_on_machine(index: int, processes: int) -> tuple[int, int]:
    """A process's number among those that torchrun or Slurm started on this machine, and their number.

    Args:
        index: its number among the processes of all machines.
        processes: the number of processes on all machines.
    """
    return int(os.environ.get("LOCAL_RANK", index)), int(os.environ.get("LOCAL_WORLD_SIZE", max(1, processes)))
