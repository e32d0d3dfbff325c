"""Chapter 11: ranks in a grid of data and experts; each has rows of its own and some of the experts."""

from functools import partial

from torch.distributed.device_mesh import init_device_mesh

from course_utils.checks import load_code
from course_utils.hardware import device
from tests.techniques import Job, sgd, technique, trained

JOBS = ("experts", "experts, capacity 1.25", "experts, capacity 0.75")

expert_parallel, is_expert = load_code(11, "expert_parallel"), load_code(11, "is_expert")
add_up_gradients = load_code(11, "add_up_gradients")
share_of_loss = load_code(11, "share_of_loss")

Sizes = tuple[int, int]  # data, experts


def mesh_of(sizes: Sizes):
    return init_device_mesh(device().type, sizes, mesh_dim_names=("data", "experts"))


def train(sizes: Sizes, rank: int, job: Job, cut=expert_parallel, add_up=add_up_gradients):
    mesh = mesh_of(sizes)
    model = cut(job.model(), mesh.get_group("experts"))
    optimizer = sgd(model)
    for batch in job.batches:
        inputs, targets = (part.tensor_split(mesh.size())[rank].to(device()) for part in batch)
        optimizer.zero_grad()
        share_of_loss(model(inputs), targets, batch[1].numel()).backward()
        add_up(model, mesh.get_group("data"))
        optimizer.step()
    return trained(model)


for sizes in ((1, 2), (1, 4), (2, 2)):
    name = f"experts_of_{sizes[1]}_ranks_and_data_of_{sizes[0]}"
    technique([sizes[0] * sizes[1]], JOBS, name)(partial(train, sizes))
