"""A SLURM cluster on this machine: its real daemons, several nodes, in a network of their own.

Each node has a name and an address, as hosts have: torchrun looks at both to find out which of the
agents hosts the rendezvous store.

with slurm_cluster(folder, nodes=3) as cluster:
    job = cluster.sbatch("job.sh")
    cluster.kill_node("n3")         # kill -9 to its daemon and to all that it has started

Needs root, Debian's packages slurmctld, slurmd, slurm-client and munge, and iproute2's `ip`. The
network is a namespace with a loopback interface alone, so nothing listens outside of it. Leaving the
block ends everything that was started in it.
"""

import contextlib
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare")
CONTROLLER = "controller"
ADDRESS = "10.78.0.1"
NODE_ADDRESS = "10.78.0.1{}"
PATIENCE = 900
SETTINGS = """
ClusterName=course
SlurmctldHost={host}({address})
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=60
BatchStartTimeout=60
SchedulerParameters=sched_interval=5,bf_interval=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
NodeName=n[1-{nodes}] NodeHostname=n[1-{nodes}] NodeAddr=n[1-{nodes}] Port=[17001-{last_port}] CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def why_not() -> str | None:
    """Why this machine cannot have a cluster, or None."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    packages = "Debian's slurmctld slurmd slurm-client munge iproute2"
    return f"there is no {', '.join(lacking)} ({packages})" if lacking else None


class Cluster:
    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.namespace = folder, f"slurm-{uuid.uuid4().hex[:8]}"
        self.addresses = {f"n{n}": NODE_ADDRESS.format(n) for n in range(1, nodes + 1)}
        self.names = list(self.addresses)
        settings = folder / "slurm.conf"
        settings.write_text(
            SETTINGS.format(
                folder=folder,
                host=CONTROLLER,
                address=ADDRESS,
                nodes=nodes,
                last_port=17000 + nodes,
            )
        )
        hosts = {"localhost": "127.0.0.1", CONTROLLER: ADDRESS, **self.addresses}
        lines = "".join(f"{address} {name}\n" for name, address in hosts.items())
        (folder / "hosts").write_text(lines)
        self._environment = os.environ | {
            "SLURM_CONF": str(settings),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }

    def start(self) -> None:
        subprocess.run(["ip", "netns", "add", self.namespace], check=True)
        self.run("ip", "link", "set", "lo", "up")
        # SLURM resolves addresses only where there is one beside that of the loopback interface
        self.run("ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
        for address in (ADDRESS, *self.addresses.values()):
            self.run("ip", "address", "add", f"{address}/24", "dev", "cable0")
        self.run("ip", "link", "set", "cable0", "up")
        self.run("ip", "link", "set", "cable1", "up")
        for name in ("munge", "state", *[f"spool-{node}" for node in self.names]):
            (self.folder / name).mkdir(mode=0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        where = self.folder / "munge"
        self.daemon(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={where}/socket", f"--pid-file={where}/pid", f"--seed-file={where}/seed"),
            f"--log-file={where}/log",
        )
        self.wait(lambda: (where / "socket").exists(), "munge")
        self.daemon("slurmctld", "-D")
        for node in self.names:
            self.start_node(node)
        self.wait(lambda: set(self.states().values()) == {"idle"}, "idle nodes")

    def daemon(self, *command: str, host: str = CONTROLLER) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            inside = self._inside(command, host)
            subprocess.Popen(inside, env=self._environment, stdout=log, stderr=log)

    def _inside(self, command: tuple[str, ...], host: str = CONTROLLER) -> list[str]:
        # not `ip netns exec`, which hides /sys/fs/cgroup; slurmd looks for it
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--mount", "--uts"]
        # the names have addresses, and this host has one of the names
        as_host = f'mount --bind "$0" /etc/hosts && hostname {host} && exec "$@"'
        return [*enter, "sh", "-c", as_host, str(self.folder / "hosts"), *command]

    def start_node(self, node: str) -> None:
        self.daemon("slurmd", "-D", "-N", node, host=node)

    def run(self, *command: str, **more) -> str:
        """What a command prints inside the cluster's network."""
        return subprocess.run(
            self._inside(command),
            env=self._environment,
            check=True,
            capture_output=True,
            text=True,
            **more,
        ).stdout

    def states(self) -> dict[str, str]:
        try:
            lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        except subprocess.CalledProcessError:  # the controller is not up
            return {}
        return dict(line.split() for line in lines)

    def state_of(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED ..."""
        words = self.run("scontrol", "show", "job", job).split()
        return next(word for word in words if word.startswith("JobState=")).split("=")[1]

    def processes(self) -> list[psutil.Process]:
        """All living processes of the cluster: those in its network.

        The daemon of a step has an empty environment, and nothing else tells whose it is.
        """
        path = Path("/run/netns", self.namespace)
        network = path.stat().st_ino if path.exists() else -1
        return [p for p in psutil.process_iter() if network_of(p) == network]

    def kill_node(self, node: str) -> None:
        """kill -9 to its daemon and to all that it has started, as when a host loses its power."""
        found = [process for process in self.processes() if belongs_to(process, node)]
        # a step's daemon has another environment; it is the parent of what it has started
        steps = {p for process in found for p in parents(process) if "slurmstepd" in title(p)}
        every = {*found, *steps}
        # all are stopped before the first dies: srun has a companion that cancels its step when it is
        # gone. Daemons come first, which would report the end of the others
        for process in sorted(every, key=is_daemon, reverse=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        # then children die before their parents: a group of stopped processes whose last link to its
        # session dies gets SIGHUP and SIGCONT from the kernel, and srun cancels its step (seen)
        for process in sorted(every, key=lambda each: len(parents(each)), reverse=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def wait(self, condition, what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(logs))

    def stop(self) -> None:
        deadline = time.monotonic() + 60
        while (left := self.processes()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=5)
        assert not left, f"processes left: {left}"
        subprocess.run(["ip", "netns", "delete", self.namespace], check=False)


def network_of(process: psutil.Process) -> int | None:
    """The number of its network namespace; None if it has just ended."""
    try:
        return Path(f"/proc/{process.pid}/ns/net").stat().st_ino
    except OSError:
        return None


def variables(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_daemon(process: psutil.Process) -> bool:
    return title(process).startswith(("slurmd ", "slurmstepd: "))


def parents(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.parents()
    except psutil.Error:
        return []


def belongs_to(process: psutil.Process, node: str) -> bool:
    """A node's daemon has its name in the command line, all others in a variable."""
    daemon = title(process) == f"slurmd -D -N {node}"
    return daemon or variables(process).get("SLURMD_NODENAME") == node


@contextlib.contextmanager
def slurm_cluster(folder: Path, nodes: int) -> Iterator[Cluster]:
    cluster = Cluster(folder, nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
