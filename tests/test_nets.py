"""The model zoo: shapes, gradients, published sizes, errors, and a user's own module."""

import copy
import doctest
import importlib
import math
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from fedalloy import models
from fedalloy.core.imports import Imports
from fedalloy.core.measure import samples
from fedalloy.errors import FedAlloyError
from fedalloy.models import Inputs, Net, Outputs, adopt, build, names, size_of
from fedalloy.models.bilstm import Reader
from fedalloy.models.resnet import _projection

VECTORS = Inputs("vector", (12,), classes=3)
TOKENS = Inputs("tokens", (9,), classes=2, vocab=30)
HUGE = {"vit-b16", "vit-b32"}
HEAVY = {"vgg11", "resnet18", "resnet34", "resnet50", "resnet110", "densenet"}
IMAGE_MODELS = [model.name for model in names() if "image" in model.kinds]


def images(channels: int, side: int, classes: int = 10) -> Inputs:
    return Inputs("image", (channels, side, side), classes)


DIGITS = images(1, 8)


def cases() -> Iterator[tuple[str, Inputs]]:
    for name in IMAGE_MODELS:
        if name in HUGE:
            continue
        yield name, DIGITS
        yield name, images(3, 32)
        if name not in HEAVY:
            yield name, images(1, 28)
            yield name, images(3, 64)
    yield "mlp(depth=2, norm=batch)", VECTORS
    yield "mlp(depth=0)", VECTORS
    yield "bilstm(embed=7, hidden=5)", TOKENS
    yield "vgg11(norm=batch)", DIGITS
    yield "resnet18(norm=group, width=0.25)", DIGITS
    yield "resnet18(width=0.25, units=(9, 5))", DIGITS
    yield "mobilenetv2(width=0.35, units=(7,))", DIGITS
    yield "shufflenet(width=0.5, units=(9, 5))", DIGITS
    yield "densenet(growth=8)", images(1, 96)
    yield "vit-tiny(dropout=0.1)", images(1, 9)
    yield "efficientnet-b0(dropout=0.2)", Inputs("image", (2, 8, 80), classes=4)
    yield "cnn-feddw(widths=(4, 8))", Inputs("image", (2, 8, 20), classes=4)


@pytest.mark.parametrize(("text", "inputs"), list(cases()), ids=lambda value: getattr(value, "shape", value))
def test_shapes_and_gradients(text: str, inputs: Inputs) -> None:
    torch.manual_seed(0)
    net = build(text, inputs)
    out = net(samples(inputs, 3))
    assert out.features.shape == (3, net.width)
    assert out.logits.shape == (3, inputs.classes)
    assert isinstance(net.neck, nn.Identity)
    assert isinstance(net.head, nn.Linear)
    assert net.head.in_features == net.width
    loss = nn.functional.cross_entropy(out.logits, torch.tensor([0, 1, 0]))
    torch.autograd.backward(loss)
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("inputs", [DIGITS, images(1, 28), images(3, 64), images(3, 224)])
def test_every_side(name: str, inputs: Inputs) -> None:
    with torch.device("meta"):
        net = build(name, inputs).eval()
        out = net(torch.empty(2, *inputs.shape))
    assert out.features.shape == (2, net.width)
    assert out.logits.shape == (2, inputs.classes)


@pytest.mark.parametrize(
    "text", [*(n for n in IMAGE_MODELS if n not in HUGE | HEAVY), "resnet18(width=0.25)", "bilstm"]
)
def test_the_seed_decides(text: str) -> None:
    inputs = TOKENS if text == "bilstm" else DIGITS
    first, second, other = (_flat(text, inputs, seed) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def _flat(text: str, inputs: Inputs, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return nn.utils.parameters_to_vector(build(text, inputs).parameters())


IMAGENET = images(3, 224, classes=1000)


@pytest.mark.parametrize(
    ("text", "inputs", "parameters"),
    [
        ("cnn", images(1, 28), 582_026),
        ("lenet", images(1, 28), 61_706),
        ("cnn-fedrda", images(3, 32), 62_006),
        ("resnet110", images(3, 32), 1_727_962),
        ("resnet18", images(3, 32), 11_173_962),
        ("resnet18(units=(256, 128))", images(3, 32), 11_173_962 - 5_130 + 131_328 + 32_896 + 1_290),
        ("resnet18", IMAGENET, 11_689_512),
        ("resnet34", IMAGENET, 21_797_672),
        ("resnet50", IMAGENET, 25_557_032),
        ("mobilenetv2", IMAGENET, 3_504_872),
        ("shufflenet", IMAGENET, 2_278_604),
        ("shufflenet(width=0.5)", IMAGENET, 1_366_792),
        ("efficientnet-b0", IMAGENET, 5_288_548),
        ("densenet", IMAGENET, 7_978_856),
        ("vit-b16", IMAGENET, 86_567_656),
        ("vit-b32", IMAGENET, 88_224_232),
        ("vit-tiny", IMAGENET, 5_717_416),
    ],
)
def test_published_parameter_counts(text: str, inputs: Inputs, parameters: int) -> None:
    assert size_of(text, inputs).parameters == parameters


def test_size() -> None:
    before = torch.get_rng_state()
    size = size_of("cnn-bn", DIGITS)
    assert size.buffers == 2 * (32 + 64 + 128)
    convolutions = 16 * 9 * 32 + 4 * 9 * 32 * 64 + 9 * 64 * 128
    assert size.flops == 2 * (convolutions + 128 * 10)
    assert torch.equal(torch.get_rng_state(), before)


def test_flops_of_attention_and_lstm_are_counted() -> None:
    words, width = 5, 192
    layer = 12 * words * width**2 + 2 * words**2 * width
    assert size_of("vit-tiny", DIGITS).flops == 2 * (4 * 16 * width + 12 * layer + width * 10)
    steps = 2 * 9 * 4 * 5 * (7 + 5)
    dense = 10 * 256 + 256 * 128 + 128 * 2
    assert size_of("bilstm(embed=7, hidden=5)", TOKENS).flops == 2 * (steps + dense)


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_pooling_before_relu_changes_nothing(norm: str) -> None:
    body = build(f"vgg11(norm={norm})", DIGITS).body.eval()
    assert isinstance(body, nn.Sequential)
    layers = list(body)
    pools = [index for index, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]
    for index in pools:
        layers[index], layers[index + 1] = layers[index + 1], layers[index]
    assert len(pools) == 3  # 8 -> 4 -> 2 -> 1, and no further
    x = samples(DIGITS, 2)
    assert torch.equal(body(x), nn.Sequential(*layers)(x))


@pytest.mark.parametrize("name", ["cnn", "vgg11", "resnet18", "mobilenetv2", "shufflenet", "densenet"])
def test_features_are_not_negative(name: str) -> None:
    assert (build(name, DIGITS)(samples(DIGITS, 2)).features >= 0).all()


def test_features_do_not_vanish_without_normalisation() -> None:
    torch.manual_seed(0)
    assert build("vgg11", DIGITS)(samples(DIGITS, 8)).features.std() > 0.05


def test_padding_is_not_read() -> None:
    reader = Reader(vocab=30, embed=7, hidden=5)
    text = torch.tensor([[4, 8, 15, 0, 0], [16, 23, 4, 2, 1]])
    state = reader(text)
    assert torch.allclose(state[:1], reader(text[:1, :3]), atol=1e-6)
    assert reader(torch.zeros(2, 5, dtype=torch.long)).isfinite().all()


def test_reading_both_ways_is_a_packed_bidirectional_lstm() -> None:
    reader, usual = Reader(30, 7, 5), torch.nn.LSTM(7, 5, batch_first=True, bidirectional=True)
    onward, inward = reader.onward.state_dict(), reader.inward.state_dict()
    usual.load_state_dict({**onward, **{f"{name}_reverse": value for name, value in inward.items()}})
    text = torch.tensor([[4, 8, 15, 0, 0], [16, 23, 4, 2, 1], [7, 0, 3, 0, 0], [9, 0, 0, 0, 0]])
    words = pack_padded_sequence(reader.embedding(text), torch.tensor([3, 5, 3, 1]), True, False)
    ahead, back = usual(words)[1][0]
    assert torch.allclose(reader(text), torch.cat([ahead, back], dim=1), atol=1e-6)


def test_narrow_residual_nets_train_on_large_images() -> None:
    """With the stride in the 1x1 convolution of a shortcut this ended the process."""
    inputs = images(3, 64)
    net = build("resnet18(width=0.125)", inputs)
    torch.autograd.backward(nn.functional.cross_entropy(net(samples(inputs, 8)).logits, torch.arange(8)))
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in net.parameters())


def test_a_shortcut_is_a_convolution_with_a_stride() -> None:
    shortcut = _projection(24, 48, 2, "batch").eval()
    convolution = next(layer for layer in shortcut.modules() if isinstance(layer, nn.Conv2d))
    for side in (8, 9):
        x = torch.randn(2, 24, side, side)
        usual = nn.functional.conv2d(x, convolution.weight, stride=2) / math.sqrt(1 + 1e-5)
        assert torch.allclose(shortcut(x), usual, atol=1e-5)


def test_a_net_can_be_copied() -> None:
    net = build("resnet18(width=0.125)", DIGITS).eval()
    x = samples(DIGITS, 2)
    assert torch.equal(copy.deepcopy(net)(x).logits, net(x).logits)


@pytest.mark.parametrize(
    "text", ["EfficientNet-B0", "efficientnet_b0", " efficientnetb0 ", "ResNet-18", "VIT_tiny"]
)
def test_spelling_does_not_matter(text: str) -> None:
    with torch.device("meta"):
        assert isinstance(build(text, DIGITS), Net)


def test_names() -> None:
    models = names()
    assert [model.name for model in models][:2] == ["mlp", "cnn"]
    assert {model.name: model.kinds for model in models}["mlp"] == ("image", "vector")
    assert all(20 < len(model.description) < 110 and "\n" not in model.description for model in models)


@pytest.mark.parametrize(
    ("text", "inputs", "message"),
    [
        ("resnet81", DIGITS, "unknown model 'resnet81'; did you mean 'resnet18'?"),
        ("mlp(hiden=3)", DIGITS, "unknown parameter of mlp 'hiden'; did you mean 'hidden'?"),
        ("lenet(width=2)", DIGITS, "lenet takes no parameters"),
        ("mlp(hidden=0)", DIGITS, "mlp: hidden must be a whole number from 1 to 16384, not 0"),
        ("mlp(hidden=2.5)", DIGITS, "hidden must be a whole number"),
        ("mlp(hidden=true)", DIGITS, "hidden must be a whole number"),
        ("mlp(norm=layer)", DIGITS, "norm must be 'none' or 'batch', not 'layer'"),
        ("resnet18(norm=none)", DIGITS, "norm must be 'batch' or 'group', not None"),
        ("resnet18(width=-1)", DIGITS, "width must be a number from 0.1 to 8, not -1"),
        ("shufflenet(width=0.7)", DIGITS, "width must be one of the paper's 0.5, 1, 1.5 and 2, not 0.7"),
        ("vit-tiny(dropout=1)", DIGITS, "dropout must be a number from 0 to 0.9, not 1"),
        ("cnn-feddw(widths=(3,))", DIGITS, r"widths must be 2 values, each a whole number .*, not \(3,\)"),
        ("cnn-feddw(widths=3)", DIGITS, "widths must be 2 values"),
        (
            "bilstm",
            DIGITS,
            "bilstm reads tokens, this data set holds images; use cnn, resnet18 or mlp instead",
        ),
        ("resnet18", VECTORS, "resnet18 reads images, this data set holds vectors; use mlp instead"),
        ("mlp", TOKENS, "mlp reads images and vectors, this data set holds tokens; use bilstm instead"),
        ("bilstm", Inputs("tokens", (9,), classes=2), "the vocabulary holds 0"),
        ("vgg11", images(1, 6), "vgg11 reads images from 8x8 on, these are 6x6; use mlp instead"),
        ("mlp+cnn", DIGITS, "names 2 things"),
        ("mlp(", DIGITS, "cannot read"),
    ],
)
def test_errors(text: str, inputs: Inputs, message: str) -> None:
    with pytest.raises(FedAlloyError, match=message):
        build(text, inputs)


class Own(nn.Module):
    """As in torchvision: features, a pool, and a classifier that ends in the logits."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(inputs.shape[0], 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, inputs.classes))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(x).mean(dim=(2, 3)))
        return out


class Tied(nn.Module):
    """Uses its last layer twice, so that there is no body to cut off."""

    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 3)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.fc(x)) + self.fc.weight.sum()
        return out


def test_adopt_keeps_the_function_and_the_modes() -> None:
    module = Own(DIGITS)
    module.features[1].eval()  # a frozen BatchNorm stays frozen
    x = samples(DIGITS, 4)
    expected = module.eval()(x)
    module.train()
    module.features[1].eval()
    net = adopt(module, DIGITS)
    assert net.training
    assert module.classifier.training
    assert not module.features[1].training
    out = net.eval()(x)
    assert isinstance(out, Outputs)
    assert torch.equal(out.logits, expected)
    assert out.features.shape == (4, net.width) == (4, 8)
    assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in Own(DIGITS).parameters())


def test_adopt_small_modules() -> None:
    assert adopt(nn.Linear(12, 3), VECTORS).width == 12
    assert (
        adopt(nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 10)), DIGITS).width == 5
    )
    net = build("mlp", VECTORS)
    assert adopt(net, VECTORS) is net


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            nn.Sequential(nn.Linear(12, 8), nn.ReLU()),
            r"no nn.Linear with 3 outputs \(it has: 8\); write a module",
        ),
        (nn.Identity(), r"it has: none"),
        (nn.Sequential(nn.Linear(12, 3), nn.LogSoftmax(1)), "not a body followed by the linear layer '0'"),
        (nn.Sequential(nn.Unflatten(1, (1, 12)), nn.Linear(12, 3)), "not a body followed by"),
        (Tied(nn.Identity()), "not a body followed by the linear layer 'fc'"),
        (nn.Sequential(nn.Linear(11, 3)), r"Sequential fails on a batch of shape \(2, 12\)"),
        (nn.Sequential(nn.Linear(12, 3), nn.LSTM(3, 3)), "Sequential gives a tuple, not logits"),
    ],
)
def test_adopt_refuses_and_leaves_the_module_whole(module: nn.Module, message: str) -> None:
    before = str(module)
    with pytest.raises(FedAlloyError, match=message):
        adopt(module, VECTORS)
    assert str(module) == before
    assert module.training


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\n"
        "def fixed() -> nn.Module: return nn.Linear(12, 3)\n"
        "def sized(inputs) -> nn.Module: return nn.Linear(inputs.shape[0], inputs.classes)\n"
        "def optional(width=12) -> nn.Module: return nn.Linear(width, 3)\n"
        "def two(a, b) -> nn.Module: pass\n"
        "def number() -> nn.Module: return 3\n"
        "def silent(): raise SystemExit\n"
        "constant = 3\n"
        "class Whole(nn.Sequential):\n"
        "    def __init__(self, inputs): super().__init__(nn.Linear(12, 6), nn.Linear(6, 3))\n"
    )
    (tmp_path / "own_broken.py").write_text("import no_such_thing_at_all\n")


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize("name", ["fixed", "sized", "optional", "Whole"])
def test_own_factory(name: str) -> None:
    net = build(f"own_models:{name}", VECTORS, Imports())
    assert net(samples(VECTORS, 2)).logits.shape == (2, 3)
    assert size_of(f"own_models:{name}", VECTORS, Imports()).flops > 0


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such_models:fixed", "no module 'no_such_models' in this folder or installed"),
        ("own_models:fixt", "unknown name in module own_models 'fixt'; did you mean 'fixed'?"),
        ("own_models:constant", "is no model; it must be an nn.Module class"),
        ("own_models:number", "makes something of type int; it must make an nn.Module"),
        ("own_models:silent", "is no model"),
        ("own_models:two", "requires a, b; it may require one argument, the Inputs"),
        ("own_models:", "write 'package.module:name'"),
        (".own_models:fixed", "write 'package.module:name'"),
    ],
)
def test_own_factory_errors(text: str, message: str) -> None:
    with pytest.raises(FedAlloyError, match=message):
        build(text, VECTORS, Imports())


@pytest.mark.usefixtures("own_models")
def test_an_import_that_fails_inside_the_users_module_is_shown_as_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        build("own_broken:fixed", VECTORS, Imports())


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(models.__path__)] + [""])
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(f"fedalloy.models.{name}" if name else "fedalloy.models")
    assert doctest.testmod(module).failed == 0
