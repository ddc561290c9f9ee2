"""Hosts on one machine: network namespaces, joined by a network of a latency and a bandwidth of one's choice.

    python benchmarks/hosts.py                                       # as root: 2 hosts train with torchrun
    python benchmarks/hosts.py --hosts 4 --delay 5 --bandwidth 1000  # 5 ms one way, 1 Gbit/s
    python benchmarks/hosts.py --layout cpu:a1-l1-d2 -- ppo-cartpole --scheme.lag 1   # a group on each host
    python benchmarks/hosts.py -- ppo-atari --total-steps 20k        # another run

The run is repeated in one process. Exit status 0: same digest and same ledger.

Every host is a namespace with a TUN device. One process reads the packets of all, and hands each to the host that it is
for when it would have come over a real link. The kernel does the rest: programs see ordinary TCP. Namespaces and
devices belong to that process, and end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import itertools
import math
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from projection import Network

from lockstep.system import children

DEVICE = "lockstep0"
ROOT = Path(__file__).resolve().parents[1]
_PORT = "29400"
_PACKET = 65_520
"""Bytes: the largest that a TUN device takes, so that Python handles as few as possible."""
_CLONE_NEWNET, _TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000
_TCP = {
    "tcp_slow_start_after_idle": "0",
    "tcp_congestion_control": "reno",
    "tcp_rmem": "4096 33554432 67108864",
    "tcp_wmem": "4096 33554432 67108864",
}
"""As one sets it where links are long: windows that grow fast, and stay large while nothing is sent."""
_PREFIX = bytes([10, 77, 0])
_ITSELF = 254
"""Last number of the address at which the network takes orders."""
_HEADERS = 28
"""Bytes before what an order says."""
RUN = [
    *("ppo-cartpole", "--env.adapter", "gymnasium", "--scheme.acting-batch", "0"),
    *("--algorithm.rollout", "16", "--algorithm.epochs", "1", "--algorithm.minibatches", "2", "--total-steps", "768"),
]


def address(host: int) -> str:
    return ".".join(map(str, [*_PREFIX, host + 1]))


def change(network: Network) -> None:
    """Called on a host: let the network be this one from now on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as orders:
        orders.sendto(f"{network.latency} {network.bandwidth}".encode(), (address(_ITSELF - 1), 9))


def go_first() -> None:
    """Let this process have a core whenever it wants one, whatever else the machine does, where that is allowed."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


class Hosts:
    """Namespaces on one network; needs root.

    Raises:
        OSError: the right to make them is missing.
    """

    def __init__(self, count: int, network: Network | None = None) -> None:
        network = network or Network(0.0)
        self.count = count
        command = [sys.executable, __file__, "network", *map(str, (os.getpid(), count, *vars(network).values()))]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._network = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self._network.stdout is not None
        self._namespaces = self._network.stdout.readline().split()
        if len(self._namespaces) != count:
            why = self._network.communicate()[1].strip().splitlines()
            raise PermissionError(f"Hosts need root, ip and /dev/net/tun: {why[-1:]}")

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on a host."""
        return ["nsenter", f"--net=/proc/{self._network.pid}/fd/{self._namespaces[host]}", *command]

    def torchrun(self, arguments: Sequence[str], folder: Path, *, processes: int = 1, timeout: float = 600.0) -> str:
        """Start torchrun on every host, and return what it printed on the first.

        Args:
            arguments: what torchrun shall run.
            folder: current folder of all.
            processes: on each host.
        """
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", str(self.count), "--nproc-per-node", str(processes)]
        command += ["--master-addr", address(0), "--master-port", _PORT]
        return self._all(
            [([*command, "--node-rank", str(host), *arguments], {}) for host in range(self.count)], folder, timeout
        )

    def srun(self, arguments: Sequence[str], folder: Path, *, timeout: float = 600.0) -> str:
        """Start a program on every host with the variables that Slurm's srun sets, and return what it printed on the
        first."""
        of_all = {"SLURM_NTASKS": str(self.count), "SLURM_STEP_NODELIST": f"10.77.0.[1-{self.count}]"}
        of_all |= {"SLURM_JOB_ID": "31", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": f"1(x{self.count})"}
        commands = []
        for host in range(self.count):
            own = {"SLURM_PROCID": str(host), "SLURM_NODEID": str(host), "SLURM_LOCALID": "0"}
            commands.append(([sys.executable, *arguments], of_all | own))
        return self._all(commands, folder, timeout)

    def _all(self, commands: Sequence[tuple[list[str], dict[str, str]]], folder: Path, timeout: float) -> str:
        """Run one command on each host, each with its variables."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        started, pipe = [], subprocess.PIPE
        try:
            for host, (command, own) in enumerate(commands):
                there = self.on(host, command)
                variables = {**environment, **own}
                started.append(subprocess.Popen(there, cwd=folder, env=variables, stdout=pipe, stderr=pipe, text=True))
            with ThreadPoolExecutor(len(started)) as pool:
                ended = list(pool.map(lambda process: _ended(process, started, timeout), started))
        finally:
            for process in started:
                process.terminate()  # torchrun ends its processes then
        if failures := [errors for process, (_, errors) in zip(started, ended, strict=True) if process.returncode]:
            raise RuntimeError("\n".join(failures))
        return ended[0][0]

    def close(self) -> None:
        self._network.kill()
        self._network.communicate()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ended(process: subprocess.Popen[str], all_of_them: Sequence[Any], timeout: float) -> tuple[str, str]:
    """What a process has printed when it ends. If it fails, all end, as with srun's --kill-on-bad-exit: processes that
    have not met yet would wait for it for a quarter of an hour."""
    try:
        return process.communicate(timeout=timeout)
    finally:
        if process.returncode != 0:
            for each in all_of_them:
                each.terminate()


def _serve(parent: int, count: int, network: Network) -> None:
    """What the network's process does: make the hosts, say so, and carry their packets."""
    children.die_with_parent(parent)
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces, devices = [], []
    for host in range(count):
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        devices.append(_device(host))
    print(*namespaces, flush=True)
    go_first()
    _forward(devices, network)


def _device(host: int) -> int:
    """A TUN device in the present namespace."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (
        "link set lo up",
        f"addr add {address(host)}/24 dev {DEVICE}",
        f"link set {DEVICE} mtu {_PACKET} txqueuelen 10000 up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    for setting, value in _TCP.items():
        Path("/proc/sys/net/ipv4", setting).write_text(value)
    return device


def _forward(devices: list[int], network: Network) -> None:
    """Carry packets for ever. A host sends one after the other, at the network's bandwidth."""
    hosts, numbers = {device: host for host, device in enumerate(devices)}, itertools.count()
    waiting: list[tuple[float, int, int, bytes]] = []
    """By the time that they arrive: a number, the device, the packet."""
    idle = [0.0] * len(devices)
    """When each host has sent all that it has to send."""
    while True:
        now = time.perf_counter()
        while waiting and waiting[0][0] <= now:
            _, _, device, packet = heapq.heappop(waiting)
            os.write(device, packet)
        ready, _, _ = select.select(devices, [], [], max(0.0, waiting[0][0] - now) if waiting else None)
        now = time.perf_counter()
        for device in ready:
            packet = os.read(device, _PACKET)
            if packet[16:20] == _PREFIX + bytes([_ITSELF]):
                network = Network(*map(float, packet[_HEADERS:].split()))
            elif packet[0] >> 4 == 4 and packet[16:19] == _PREFIX and 1 <= packet[19] <= len(devices):
                host = hosts[device]
                idle[host] = max(idle[host], now) + len(packet) / network.bandwidth
                heapq.heappush(waiting, (idle[host] + network.latency, next(numbers), devices[packet[19] - 1], packet))


def compare(hosts: int, network: Network, run: Sequence[str], *, slurm: bool = False, layout: str = "torchrun") -> bool:
    """Train on several hosts and in one process; whether digest and ledger are equal.

    Args:
        slurm: start the processes with Slurm's variables, without torchrun.
        layout: torchrun, or one with a group for each host, such as cpu:a1-l3-d2.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-hosts-") as name:
        folder = Path(name)
        train = ["lockstep", "train", *run, "--display", "none", "--no-tensorboard"]
        with Hosts(hosts, network) as there:
            command = [*train, "--run", "apart", "--layout", layout]
            said = there.srun(["-m", *command], folder) if slurm else there.torchrun(["-m", "--", *command], folder)
            apart = said.splitlines()[-1]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", *train, "--run", "alone", "--layout", "inline"]
        alone = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
        equal = (folder / "apart/ledger.jsonl").read_bytes() == (folder / "alone/ledger.jsonl").read_bytes()
        print(f"{hosts} hosts: {apart}")
        print(f"one process: {alone.stdout.splitlines()[-1]}")
        print(f"ledgers {'equal' if equal else 'differ'}")
        return equal and apart == alone.stdout.splitlines()[-1]


def main() -> int:
    if sys.argv[1:2] == ["network"]:
        parent, count, latency, bandwidth = sys.argv[2:]
        _serve(int(parent), int(count), Network(float(latency), float(bandwidth)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds one way")
    parser.add_argument("--bandwidth", type=float, default=math.inf, help="Mbit/s that a host can send")
    parser.add_argument("--slurm", action="store_true", help="start processes as Slurm's srun does, without torchrun")
    parser.add_argument("--layout", default="torchrun", help="or one with a group for each host, as cpu:a1-l3-d2")
    parser.add_argument("run", nargs="*", default=RUN, help="recipe and flags, behind --")
    given = parser.parse_args()
    network = Network(given.delay / 1000, given.bandwidth * 1e6 / 8)
    return 0 if compare(given.hosts, network, given.run, slurm=given.slurm, layout=given.layout) else 1


if __name__ == "__main__":
    sys.exit(main())
