"""PyTorch's private names: all that the course uses, what for, and what happens where a PyTorch has one
no longer ("gone"). Where nothing is said: ImportError, with a sentence, in what has asked for it.

A name is looked up when it is first used. Operators such as `aten._to_copy` stand where they are meant.
"""

import functools
import pkgutil

from course_utils.comm import versions


class Name:
    """A name by its path, or that of an attribute; `instead` stands for one that is gone."""

    def __init__(self, path: str, *instead: object) -> None:
        self.path, self._instead = path, instead

    @functools.cached_property
    def value(self) -> object:
        try:
            return pkgutil.resolve_name(self.path)
        except (ImportError, AttributeError):
            if self._instead:
                return self._instead[0]
            raise self.gone() from None

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.value(*args, **kwargs)

    def of(self, owner: object) -> object:
        """The attribute of this name."""
        if not hasattr(owner, self.path):
            raise self.gone()
        return getattr(owner, self.path)

    def put(self, value: object) -> None:
        """From now on PyTorch finds this under the name."""
        owner, _, name = self.path.rpartition(".")
        setattr(pkgutil.resolve_name(owner), name, value)
        self.__dict__.pop("value", None)

    def gone(self) -> ImportError:
        return ImportError(
            f"The course uses {self.path}, which PyTorch {versions.installed()} does not have: use one "
            f"of {versions.OLDEST} to {versions.NEWEST}."
        )


class _NoMode:
    """Other classes can be made of it. Who makes an object of one gets the sentence."""

    def __init__(self) -> None:
        raise dispatch_mode.gone()


def _nothing(*_: object) -> None:
    """For a function that PyTorch no longer calls."""


# What stands in front of every operator that communicates.
all_operators = Name("torch._C._dispatch_get_all_op_names")
keys_after = Name("torch._C._dispatch_keyset_full_after")
key, keys = Name("torch._C.DispatchKey"), Name("torch._C.DispatchKeySet")
schema = Name("_schema")  # of an operator: its arguments
# The compiler passes over that. Gone: it looks into it.
skip = Name("torch._C._dynamo.eval_frame._FrameAction.SKIP")
strategy = Name("torch._C._dynamo.eval_frame._FrameExecStrategy")
set_strategy = Name("torch._C._dynamo.eval_frame.set_code_exec_strategy")
# A batch of messages, whose Work is that of all. Gone: a rank on a GPU is not seen to wait for them.
start_batch = Name("torch.distributed.ProcessGroup._start_coalescing", _nothing)
end_batch = Name("torch.distributed.ProcessGroup._end_coalescing", _nothing)
# Frames between a call and the function that makes it. Gone: another function is named.
BETWEEN = ("torch._ops", "torch.library", "torch._compile", "torch._dynamo.eval_frame")
# Loggers that tell of PyTorch and not of the program. Gone: they are heard.
FSDP_LOG = "torch.distributed.fsdp._runtime_utils"
PIPELINE_LOG = "torch.distributed.pipelining._p2p"
# What the fork server does before its ranks need it. Gone: each does it itself, which takes time.
COMPILER = "torch._dynamo"
forget_compiled = Name("torch._dynamo.trace_rules.clear_lru_cache", _nothing)
# What makes each group, what ends them all, and what all ranks of a world share. Gone: the record has
# no groups that were made, no end, and no calls of a world that the program has made itself.
new_group = Name("torch.distributed.distributed_c10d._new_group_with_tag", _nothing)
end_groups = Name("torch.distributed.distributed_c10d._unregister_all_process_groups", _nothing)
default_store = Name("torch.distributed.distributed_c10d._get_default_store")
# How long a group's calls wait. Gone: one is said to be stuck that would have ended by itself.
backend = Name("torch.distributed.ProcessGroup._get_backend")
device_types, timeout = Name("_device_types"), Name("_timeout")
# Values on their way. Gone: a function of autograd's, or a float8 tensor, cannot be rebuilt.
autograd_functions = Name("torch._C._functions", None)
new_dtypes, untyped = Name("torch.storage._new_dtypes", tuple), Name("_untyped_storage")
rebuild_tensor = Name("torch._utils._rebuild_tensor_v3", None)
# Places in stacks. Gone: less advice; a loader's thread is one that may go on.
BACKWARD, FSDP_FORWARD = "_engine_run_backward", "_pre_forward"
OPERATORS_FILE = ("torch", "_ops.py")
PINNING_FILE = ("torch", "utils", "data", "_utils", "pin_memory.py")
# What traces, meters and checks listen with.
dispatch_mode = Name("torch.utils._python_dispatch.TorchDispatchMode", _NoMode)
tree_leaves = Name("torch.utils._pytree.tree_leaves")
address, below = Name("_cdata"), Name("_op")  # of a storage; an operator without PyTorch's frame
version = Name("_version")  # of a tensor: how often it was changed in place
backward_task = Name("torch._C._current_graph_task_id")  # the backward pass that goes on
engine = Name("torch.autograd.Variable._execution_engine")
# The device and the groups of NCCL's rules.
make_device = Name("torch.utils.backend_registration._setup_privateuseone_for_python_backend")
DeviceGuard = Name("torch._C._acc.DeviceGuard")
device_kind = Name("torch._C._autograd.DeviceType.PrivateUse1")
negated, is_view = Name("torch._neg_view"), Name("torch.Tensor._is_view")
registered_for = Name("torch._C._dispatch_get_registrations_for_dispatch_key")
without_keys = Name("torch._C._ExcludeDispatchKeyGuard")
tree_map = Name("torch.utils._pytree.tree_map")
plugins = Name("torch.distributed.Backend._plugins")
Plugin = Name("torch.distributed.Backend._BackendPlugin")
set_default_backend = Name("torch.distributed.ProcessGroup._set_default_backend")
register_backend = Name("torch.distributed.ProcessGroup._register_backend")
set_group_name = Name("torch.distributed.ProcessGroup._set_group_name")
work_of = Name("torch._C._distributed_c10d._create_work_from_future")
# A group that takes in new members: from PyTorch 2.14 on, and experimental.
handle_of_group = Name("torch.distributed._get_reconfigure_handle")
reconfigure = Name("torch.distributed._reconfigure")
# Replaced under the rules. Gone: a hook that raises in backward ends in SystemError; a module may not
# move while others refer to its parameters; under Join a result counts as one that nobody waits for.
run_backward = [Name(f"torch.autograd.{it}{BACKWARD}", _nothing) for it in ("graph.", "")]
apply_to_module = Name("torch.nn.Module._apply", _nothing)
reducer_waits = Name("torch.distributed.Reducer._set_forward_pass_work_handle", _nothing)
# One rank of thousands, for `estimate.trace`.
fake_store = Name("torch.testing._internal.distributed.fake_pg.FakeStore")
fake_tensor = Name("torch._subclasses.fake_tensor.FakeTensor")
fake_mode = Name("torch._subclasses.fake_tensor.FakeTensorMode")
real_mode = Name("torch._subclasses.fake_tensor.unset_fake_temporarily")
needs_value = Name("torch._subclasses.fake_tensor.DataDependentOutputException")
needs_shape = Name("torch._subclasses.fake_tensor.DynamicOutputShapeException")
group_called = Name("torch.distributed.distributed_c10d._resolve_process_group")
shape_of = Name(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached"
)
# How stages learn of shapes, on which PyTorch 2.12 and 2.13 let them vote.
vote = Name("torch.distributed.pipelining.schedules._PipelineSchedule._warmup_p2p")
static = Name("torch.distributed.pipelining._utils.InferenceMode.STATIC")
STAGE_MODE = "_inference_mode"
forget_shardings = Name("torch.distributed.tensor.debug._clear_sharding_prop_cache")
transforms = Name("torch.distributed.tensor._redistribute._gen_transform_infos")
# The grader: tensors as they are, the operators that an answer may have replaced, the modes it has left on.
plain_tensors = Name("torch._C.DisableTorchFunctionSubclass")
replaced = Name("torch.library._impls")
kernels_of = Name("torch._C._dispatch_dump_table")
function_modes = Name("torch.overrides._get_current_function_mode_stack")
dispatch_modes = Name("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
