import torch

from course_utils.models import MnistNet


def test_mnist_net_has_the_sizes_of_the_articles():
    shapes = {name: tuple(p.shape) for name, p in MnistNet().named_parameters()}
    assert shapes == {
        "linear1.weight": (50, 784),
        "linear1.bias": (50,),
        "linear2.weight": (10, 50),
        "linear2.bias": (10,),
    }
    assert sum(p.numel() for p in MnistNet().parameters()) == 39_760


def test_mnist_net_flattens_images():
    model = MnistNet()
    images = torch.rand(3, 1, 28, 28)
    assert model(images).shape == (3, 10)
    assert torch.equal(model(images), model(images.reshape(3, 784)))


def test_mnist_net_has_a_relu_between_its_layers():
    model = MnistNet()
    with torch.no_grad():
        model.linear1.bias.fill_(-1e6)  # every hidden value is negative: only the bias is left
        logits = model(torch.rand(2, 784))
    assert torch.equal(logits, model.linear2.bias.detach().expand(2, 10))
