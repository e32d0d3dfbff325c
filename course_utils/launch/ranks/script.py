"""In a rank: a script that was written for torchrun makes its world as it does there.

launch has made one before the function begins. The script's own init_process_group takes it over, as long
as nothing has been done in it; one after destroy_process_group makes a new one. Where the rank's function
is the script itself (`run`), nobody has made a world before it does.
"""

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from course_utils.comm import intercept
from course_utils.launch.story.recorder import Recorder

_make = c10d.init_process_group
_signature = inspect.signature(_make)
_launchs = None  # launch's own world, once it is there
_NO_GPU = (
    "This machine has no GPU for NCCL. Without a backend, init_process_group() takes the one that fits: "
    "gloo here, NCCL where there are GPUs."
)


def install() -> None:
    """To be called before anything of the learner's is imported or unpacked."""
    for module in (c10d, dist, dist.device_mesh):
        module.init_process_group = _init_process_group


def offer(store: dist.Store) -> None:
    """Lets a script take over the world that is there; `store` is where its ranks have met."""
    global _launchs
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    _launchs = _World(store, place, dist.get_backend())


def begin_call() -> None:
    """The next function may take over the group, as the one before could."""
    if _launchs:
        _launchs._used = False


def expect(
    store: dist.Store, place: dict, patience: float, recorder: Recorder, made: Callable
) -> None:
    """Lets a script make the world, with this `place` (rank and world_size); `made` is called after that.
    `patience`: the seconds that its calls wait, whatever the script says."""
    global _launchs
    _launchs = _Expected(store, place, timedelta(seconds=patience), recorder, made)


@functools.wraps(_make)
def _init_process_group(*args, **kwargs):
    asked = _signature.bind(*args, **kwargs).arguments
    if _launchs and _launchs.is_untouched():
        _launchs.take_over(asked)
    elif _launchs and not dist.is_initialized() and _launchs.meets(asked):
        _make(**_launchs.again(asked))
    else:
        _make(*args, **kwargs)


class _World:
    """What launch has made."""

    def __init__(self, store, place, backend):
        self._store, self._place, self._backend = store, place, backend
        self._group = dist.group.WORLD
        self._used = False
        self._later = 0  # worlds that the script has made after it
        intercept.listen(self.on_call)

    def on_call(self, *_):
        self._used = True

    def is_untouched(self):
        return not self._used and dist.group.WORLD is self._group

    def take_over(self, asked):
        if differs := self._differs(asked):
            raise ValueError(
                f"init_process_group was called with {differs[0]}={asked[differs[0]]}, and launch has "
                f"made this rank {self._place['rank']} of {self._place['world_size']}: leave rank and "
                "world_size out, or take them from the environment (RANK, WORLD_SIZE)."
            )
        if self._backend == "nccl" and "gloo" in (asked.get("backend") or ""):
            raise ValueError(
                "init_process_group asks for gloo, and launch has given these ranks NCCL: call launch "
                'with backend="gloo".'
            )
        self._used = True

    def _differs(self, asked):
        return [name for name, mine in self._place.items() if asked.get(name, -1) not in (-1, mine)]

    def meets(self, asked):
        """Whether all ranks of launch's world would meet in a new one, where the environment says."""
        by_environment = asked.get("init_method") in (None, "env://")
        return by_environment and asked.get("store") is None and not self._differs(asked)

    def again(self, asked):
        """What to call PyTorch's init_process_group with."""
        self._later += 1
        store = dist.PrefixStore(f"script/{self._later}", self._store)
        asked = asked | self._place | {"store": store, "init_method": None}
        if self._backend == "gloo" and "nccl" in (asked.get("backend") or ""):
            asked["backend"] = "gloo"  # the same code with and without GPUs
        return asked


class _Expected(_World):
    """What the script itself is to make."""

    def __init__(self, store, place, patience, recorder, made):
        super().__init__(store, place, None)
        self._patience, self._recorder, self._made = patience, recorder, made

    def take_over(self, asked):
        super().take_over(asked)
        self._recorder.on_world(**self._place)
        try:
            _make(**self.again(asked) | {"timeout": self._patience})
        except Exception as error:
            self._recorder.on_refused()
            self._used, self._later = False, 0  # the script may ask again
            if "no GPUs found" in str(error):
                error.add_note(_NO_GPU)
            raise
        self._made()
