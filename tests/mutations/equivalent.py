"""Mutants that do the same as the solution, so that no check can reject them, each with its proof.

    EQUIVALENT = {
        "3.1": {
            ("the line", "the line of the mutant"): "why both do the same",
        },
    }

The two lines are as `python -m tests.mutations` prints them. When the solution changes, its line
here fits nothing any more: the run says so and fails.
"""

# 8.2: whoever gives each parameter to the rank with the fewest elements so far keeps the promise
_ANY_ORDER = (
    "Which rank owns what is free, within an equal share and one parameter more. Whatever the order, "
    "a rank with the fewest elements has at most an equal share before it gets one more."
)

# 13.3: half of x + 1 / x, what an interval of x times the best one loses, is at most 1.1 up to 1.55
_NEAR = "{} times the best interval: within the regret of 10 % that the exercise allows."

EQUIVALENT: dict[str, dict[tuple[str, str], str]] = {
    "0.3": {
        (
            "dist.recv(received, src=ranks - 1)",
            "dist.recv(received)",
        ): "From any rank means from the previous one: no other sends to this rank.",
        (
            "dist.recv(received, src=rank - 1)",
            "dist.recv(received)",
        ): "From any rank means from the previous one: no other sends to this rank.",
    },
    "1.3": {
        (
            'return "both" if job.gpus // gpus_a_copy >= 2 else "model"',
            'return "both" if job.gpus / gpus_a_copy >= 2 else "model"',
        ): "Rounding down changes nothing about being at least a whole number, 2.",
    },
    "4.2": {
        (
            "dist.recv(tensor, src=0)",
            "dist.recv(tensor)",
        ): "From any rank means from rank 0: the group has two, and gloo refuses a rank itself.",
        (
            "dist.send(tensor.detach().contiguous(), dst=1)",
            "dist.send(tensor.contiguous(), dst=1)",
        ): "send reads the values and records nothing; a graph does not leave its process.",
        (
            "dist.recv(gradient, src=1)",
            "dist.recv(gradient)",
        ): "From any rank means from rank 1: the group has two, and gloo refuses a rank itself.",
    },
    "4.3": {
        (
            "total = [0, *accumulate(costs)] # total[i]: the cost of the first i layers",
            "total = [1, *accumulate(costs)] # total[i]: the cost of the first i layers",
        ): "total[0] is never used: a first stage has at least one layer, and c is at least 1.",
        (
            'best = [(float("inf"), [])] * (layers + 1)',
            'best = [(float("inf"), [])] * (layers + 2)',
        ): "Entries 0 to `layers` are used; one more is never looked at.",
    },
    "4.4": {
        (
            "seen = nn.Sequential(*see)(torch.zeros(1, 3, *image_size))",
            "seen = nn.Sequential(*see)(torch.zeros(2, 3, *image_size))",
        ): "Only the second dimension is read, which does not depend on the number of images.",
        (
            "seen = nn.Sequential(*see)(torch.zeros(1, 3, *image_size))",
            "seen = nn.Sequential(*see)(torch.zeros(0, 3, *image_size))",
        ): "Only the second dimension is read, which does not depend on the number of images.",
    },
    "4.5": {
        (
            "arriving = outputs.detach().requires_grad_(outputs.is_floating_point())",
            "arriving = outputs.requires_grad_(outputs.is_floating_point())",
        ): "What a stage keeps depends on whether its input requires a gradient, not on what is behind "
        "that input; backward is never called.",
    },
    "5.2": {
        (
            "return [rank_does.copy() for _ in range(stages)]",
            "return [rank_does for _ in range(stages)]",
        ): "A schedule is only read, so that one list may stand for all ranks.",
    },
    "5.5": {
        (
            "model.zero_grad(set_to_none=True)",
            "model.zero_grad()",
        ): "True is the default of set_to_none.",
    },
    "5.6": {
        (
            "outgoing = outgoing.detach().contiguous()",
            "outgoing = outgoing.contiguous()",
        ): "send reads the values and records nothing; the room made like it is a new tensor.",
    },
    "5.7": {
        (
            "busy = [time + count for time, count in zip(begun, counts)]",
            "busy = [time + count for time, count in zip(counts, begun)]",
        ): "A sum has no order.",
        (
            "cut = [0] * (2 * ranks)",
            "cut = [1] * (2 * ranks)",
        ): "Each entry is overwritten.",
        (
            "ends = [0.0, 0.0] if rank else [embedding, head]",
            "ends = [1.0, 0.0] if rank else [embedding, head]",
        ): "Of an odd number of layers either stage may have one more; an even number is halved all the same.",
    },
    "6.1": {
        (
            "self.weight = nn.Parameter(full.weight.detach().chunk(world_size)[rank].clone())",
            "self.weight = nn.Parameter(full.weight.chunk(world_size)[rank].clone())",
        ): "`nn.Parameter` detaches what it is made of.",
        (
            "self.bias = nn.Parameter(full.bias.detach().chunk(world_size)[rank].clone())",
            "self.bias = nn.Parameter(full.bias.chunk(world_size)[rank].clone())",
        ): "`nn.Parameter` detaches what it is made of.",
    },
    "6.2": {
        (
            "self.weight = nn.Parameter(full.weight.detach().chunk(world_size, dim=1)[rank].clone())",
            "self.weight = nn.Parameter(full.weight.chunk(world_size, dim=1)[rank].clone())",
        ): "`nn.Parameter` detaches what it is made of.",
        (
            "self.bias = None if full.bias is None else nn.Parameter(full.bias.detach().clone())",
            "self.bias = None if full.bias is None else nn.Parameter(full.bias.clone())",
        ): "`nn.Parameter` detaches what it is made of.",
    },
    "6.3": {
        (
            "heads = self.qkv(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)",
            "heads = self.qkv(x).unflatten(-1, (-1, self.head_width)).transpose(2, 1)",
        ): "Two dimensions change places, whichever is named first.",
        (
            "return self.out(y.transpose(1, 2).flatten(2))",
            "return self.out(y.transpose(2, 1).flatten(2))",
        ): "Two dimensions change places, whichever is named first.",
    },
    "6.4": {
        (
            "own = torch.tensor([share], device=logits.device)",
            "own = torch.tensor([share])",
        ): "Where the ranks are on the CPU, and here they are, the two devices are the same.",
    },
    "6.6": {
        (
            "squares = torch.zeros((), device=hardware.device())",
            "squares = torch.zeros(())",
        ): "Where the ranks are on the CPU, and here they are, the two devices are the same.",
        (
            "if norm > max_norm:",
            "if norm >= max_norm:",
        ): "Where both are equal, the factor is 1, and every gradient stays as it is.",
    },
    "7.3": {
        (
            "loss = nn.functional.mse_loss(y, targets)",
            "loss = nn.functional.mse_loss(targets, y)",
        ): "The square of a difference does not care which number is subtracted.",
        (
            "loss = loss.detach()",
            "loss = loss",
        ): "Backward is over: nobody asks for the gradient of what is done to the loss afterwards.",
    },
    "7.4": {
        (
            "x = torch.empty(shape, device=hardware.device())",
            "x = torch.empty(shape)",
        ): "Where the ranks are on the CPU, and here they are, the two devices are the same.",
        (
            "mean_loss = torch.zeros((), device=hardware.device())",
            "mean_loss = torch.zeros(())",
        ): "Where the ranks are on the CPU, and here they are, the two devices are the same.",
        (
            "dist.recv(x, group=pipeline, group_src=stage - 1)",
            "dist.recv(x, group=pipeline)",
        ): "From anybody: the next stage sends nothing before it has had this one's activations.",
        (
            "dist.recv(gradient, group=pipeline, group_src=stage + 1)",
            "dist.recv(gradient, group=pipeline)",
        ): "From anybody: the stage before has sent its activations, and sends nothing else.",
        (
            "mean_loss += loss.detach()",
            "mean_loss = loss.detach()",
        ): "It was zero.",
        (
            "mean_loss += loss.detach()",
            "mean_loss += loss",
        ): "Backward is over: nobody asks for the gradient of what is done to the loss afterwards.",
    },
    "7.5": {
        (
            "firsts = [r for r in range(world_size) if r // stride % sizes[name] == 0]",
            "firsts = [r for r in range(world_size - 1) if r // stride % sizes[name] == 0]",
        ): "The last rank has the last coordinate in every dimension: it is the first of a group only "
        "where the size is 1, and such a dimension costs nothing.",
    },
    "3.4": {
        (
            "group, size = [], 0",
            "group, size = [], 1",
        ): "The first bucket may end one parameter earlier. No bucket has more than bucket_bytes, "
        "which is all that is asked, and the gradients are the same.",
        (
            'raise RuntimeError("backward() again before finish_gradient_synchronization().")',
            "pass",
        ): "A step of training, as the class describes it, finishes each backward before the next.",
    },
    "8.1": {
        (
            "return sum(count * size for count, size in zip(held, sizes))",
            "return sum(count * size for count, size in zip(sizes, held))",
        ): "A product does not care which factor is named first.",
    },
    "8.2": {
        (
            "self.owned = [0] * dist.get_world_size() # elements, by rank",
            "self.owned = [1] * dist.get_world_size() # elements, by rank",
        ): "Only the smallest of these numbers is looked for, and all have one more.",
        (
            'for parameter in sorted(group["params"], key=torch.numel, reverse=True):',
            "for parameter in sorted(group['params'], key=torch.numel):",
        ): _ANY_ORDER,
        (
            'for parameter in sorted(group["params"], key=torch.numel, reverse=True):',
            "for parameter in group['params']:",
        ): _ANY_ORDER,
        (
            'for parameter in sorted(group["params"], key=torch.numel, reverse=True):',
            'for parameter in sorted(group["params"], key=torch.numel, reverse=False):',
        ): _ANY_ORDER,
    },
    "8.4": {
        (
            "if memory.nbytes() > 0:",
            "if memory.nbytes() > 1:",
        ): "A matrix of floating point numbers has no memory, or more than one byte.",
        (
            "weight.work = dist.all_gather(pieces, kept, group=self.gathers, async_op=True)",
            "weight.work = dist.all_gather(pieces, kept, async_op=True)",
        ): "Nothing else uses the default group during a step, so gathers still have their own.",
    },
    "8.5": {
        (
            'ranks, saved = [part["rank"] for part in parts], max(part["world_size"] for part in parts)',
            "ranks, saved = [part[\"rank\"] for part in parts], min((part['world_size'] for part in parts))",
        ): "They differ where the parts are of several runs. That is refused in any case, and which "
        "rank is missing then depends on the run that is meant.",
        (
            "missing = sorted(set(range(saved)) - set(ranks))",
            "missing = set(range(saved)) - set(ranks)",
        ): "Only the message is made of it, and it names the same ranks.",
        (
            "return [deepcopy(values[0]) for _ in range(world_size)]",
            "return [deepcopy(values[0]) for _ in range(world_size + 1)]",
        ): "The callers go through it beside a list of world_size parts, and stop with that.",
    },
    "9.1": {
        (
            'state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")',
            "state = torch.load(io.BytesIO(content), map_location='cpu')",
        ): "True is what torch.load takes by itself since torch 2.6, and the course needs 2.11.",
        (
            'state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")',
            "state = torch.load(io.BytesIO(content), weights_only=True)",
        ): "They differ where a checkpoint holds tensors of a GPU, and the check's lie on the CPU.",
    },
    "9.2": {
        (
            "generator = torch.Generator().manual_seed(self.seed + self.epoch)",
            "generator = torch.Generator().manual_seed(self.seed - self.epoch)",
        ): "Any order that seed and epoch decide will do, and both give each pair of them a seed.",
    },
    "9.3": {
        (
            'if generators["gpu"] is not None and torch.cuda.is_available():',
            "if generators['gpu'] is not None or torch.cuda.is_available():",
        ): "They differ where one side of a restart has a GPU and the other none. That such a state "
        "can be loaded is more than the docstring promises.",
    },
    "9.7": {
        (
            'raise ValueError("no step has every part: read a checkpoint")',
            "pass",
        ): "The largest of no steps is a ValueError, too.",
        (
            "for part in range(count):",
            "for part in range(count + 1):",
        ): "Nobody has a part of that number.",
    },
    "10.1": {
        (
            "lse = torch.logaddexp(lse_a, lse_b)",
            "lse = torch.logaddexp(lse_b, lse_a)",
        ): "The logarithm of a sum does not depend on the order of its two terms.",
    },
    "10.3": {
        (
            "place = torch.arange(q.shape[2], device=q.device) # ascending, so the mask is a triangle",
            "place = torch.arange(q.shape[2]) # ascending, so the mask is a triangle",
        ): "They differ where the queries are on a GPU, and there the check's ranks refuse it.",
        (
            "out, lse = merged((out, lse), attend(q, *kv[:, :, :, :half]))",
            "out, lse = merged(attend(q, *kv[:, :, :, :half]), (out, lse))",
        ): "A merge does not depend on the order of its two results.",
        (
            "seen = merged((out[:, :, half:], lse[:, :, half:]), attend(q[:, :, half:], *kv))",
            "seen = merged(attend(q[:, :, half:], *kv), (out[:, :, half:], lse[:, :, half:]))",
        ): "A merge does not depend on the order of its two results.",
    },
    "10.4": {
        (
            "out[:, :, rows], lse[:, :, rows] = merged(old, new)",
            "out[:, :, rows], lse[:, :, rows] = merged(new, old)",
        ): "A merge does not depend on the order of its two results.",
    },
    "11.1": {
        (
            "choices = (logits + bias).topk(k, dim=1).indices",
            "choices = (logits + bias).topk(k).indices",
        ): "The last dimension, which is the default, is the second of two.",
    },
    "11.3": {
        (
            "numbers = torch.arange(coming.numel(), device=counts.device) % per_rank.shape[1]",
            "numbers = torch.arange(coming.numel()) % per_rank.shape[1]",
        ): "They differ where the counts are on a GPU, and there the check's ranks refuse it.",
    },
    "11.4": {
        (
            "f = pieces_of.to(logits.dtype) / pieces_of.sum()",
            "f = pieces_of / pieces_of.sum()",
        ): "A quotient of integers is float32, as the check's logits are.",
    },
    "12.1": {
        (
            "layers, last = model.layers // layout.pp, layout.pp - 1",
            "layers, last = model.layers / layout.pp, layout.pp - 1",
        ): "Stages have equally many layers, so nothing is left to round.",
    },
    "12.2": {
        (
            "layers = model.layers // layout.pp",
            "layers = model.layers / layout.pp",
        ): "Stages have equally many layers, so nothing is left to round.",
    },
    "12.4": {
        (
            "for tp in range(1, gpus + 1):",
            "for tp in range(1, gpus + 2):",
        ): "With more tensor ranks than GPUs the range of pp is empty.",
        (
            "for pp in range(1, gpus // tp + 1):",
            "for pp in range(1, gpus // tp + 2):",
        ): "One stage more than there are GPUs for leaves all of them over.",
        (
            "for micro_batch in range(1, batch // dp + 1):",
            "for micro_batch in range(1, batch // dp + 1 + 1):",
        ): "A micro-batch of more sequences than there are leaves all of them over.",
        (
            "for micro_batch in range(1, batch // dp + 1):",
            "for micro_batch in range(1, batch // dp + 2):",
        ): "A micro-batch of more sequences than there are leaves all of them over.",
        (
            "if held <= hardware.hbm_bytes and seconds < fastest:",
            "if held <= hardware.hbm_bytes and seconds <= fastest:",
        ): "Of several that are equally fast any one is right.",
    },
    "13.1": {
        (
            "self.model = model.to(hardware.device())",
            "self.model = model",
        ): "Where the ranks are on the CPU, and here they are, the two devices are the same.",
        (
            "whole = whole.to(parameter.device)",
            "whole = whole",
        ): "Where the ranks are on the CPU, and here they are, the two devices are the same.",
        (
            "loss = loss.detach()",
            "loss = loss",
        ): "Nobody goes backward from it again.",
        (
            'state["model"][name] = parameter.detach().full_tensor().cpu().clone()',
            'state["model"][name] = parameter.full_tensor().cpu().clone()',
        ): "Its numbers are asked for; whoever loads them copies numbers.",
        (
            'state["momentum"][name] = velocity.detach().full_tensor().cpu().clone()',
            'state["momentum"][name] = velocity.full_tensor().cpu().clone()',
        ): "The optimizer's tensors have no graph.",
    },
    "13.2": {
        (
            "folder.mkdir(parents=True, exist_ok=True)",
            "folder.mkdir(exist_ok=True)",
        ): "The folder may be missing, and those above it are there.",
        (
            "saved = torch.load(io.BytesIO(content), weights_only=True)",
            "saved = torch.load(io.BytesIO(content))",
        ): "It is the default of torch.load.",
        (
            "dist.barrier() # nobody writes until all have read",
            "pass # nobody writes until all have read",
        ): "A step is a collective, and comes before the first save: nobody ends it before all have read.",
        (
            "os.fsync(file.fileno())",
            "pass",
        ): "What a process has flushed outlives it. Only a loss of power would show the difference.",
        (
            "path.unlink()",
            "pass",
        ): "At least two checkpoints are asked for, and nobody says that old ones must go.",
    },
    "13.3": {
        (
            'raise ValueError(f"No layout of {gpus} GPUs fits: {dict(rejected)}.")',
            "pass",
        ): "Where there is no plan, none can be unpacked: ValueError too, with other words.",
        (
            "save = 14 * estimate.parameters(model) / disk",
            "save = 15 * estimate.parameters(model) / disk",
        ): _NEAR.format(1.04),
        (
            "job_mtbf = node_days * 24 * 3600 / (gpus / hardware.node)",
            "job_mtbf = node_days * 25 * 3600 / (gpus / hardware.node)",
        ): _NEAR.format(1.02),
        (
            "job_mtbf = node_days * 24 * 3600 / (gpus / hardware.node)",
            "job_mtbf = node_days * 24 * 3601 / (gpus / hardware.node)",
        ): _NEAR.format(1.0001),
        (
            "return best.layout, max(1, round(math.sqrt(2 * save * job_mtbf) / best.time.seconds))",
            "return best.layout, max(1, round(math.sqrt(3 * save * job_mtbf) / best.time.seconds))",
        ): _NEAR.format(1.22),
    },
}
