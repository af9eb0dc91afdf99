# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training: the torch side equals mxdraft.mx, learns, and resumes exactly."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tiny  # noqa: E402
from mxdraft import mx  # noqa: E402
from mxdraft.checkpoint import Checkpoint, ModelConfig, TokenizerSpec, expected_tensors  # noqa: E402
from mxdraft.checkpoint.smooth import smooth  # noqa: E402
from mxdraft.cli import cli  # noqa: E402
from mxdraft.errors import RefusedError, UsageError  # noqa: E402
from mxdraft.files.npz import read_windows  # noqa: E402
from mxdraft.measure.quality import Quality, log_softmax  # noqa: E402
from mxdraft.measure.sensitivity import by_kind, by_layer, groups, sensitivity  # noqa: E402
from mxdraft.train.corpus import repetition  # noqa: E402
from mxdraft.train.delta import TrainedBase, apply_delta  # noqa: E402
from mxdraft.train.fakequant import MXLinear, fake_quant_activations, round_e2m1  # noqa: E402
from mxdraft.train.loss import distillation_loss, measure_quality  # noqa: E402
from mxdraft.train.model import Llama  # noqa: E402
from mxdraft.train.recipe import Recipe, read_recipe  # noqa: E402
from mxdraft.train.start import compensate, search_scale, start_quantized, within_reach  # noqa: E402
from mxdraft.train.target import Trainer, train_target  # noqa: E402

CONFIG = ModelConfig(
    hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, ffn=96, vocab=128, max_positions=64,
    rms_eps=1e-5, rope_theta=1e4, tied=True,
)  # fmt: skip
RECIPE = Recipe(
    texts=["text.npz"], context=16, held_out=2, max_repetition=0.9, smoothing=0, start="compensate",
    calibration=4, int8_activations=False, compute="f32", compile=False,
    steps=6, batch=2, lr=0.02, norm_lr=1e-3, warmup=1, cooldown=3,
    beta1=0.9, beta2=0.98, gradient_clip=1.0, latent_clip=8.0, reach=0.0, dampen=0.0, seed=0,
    log_every=1, evaluate_every=3, checkpoint_every=3,
)  # fmt: skip
RECIPE_TOML = Path(__file__).parents[1] / "models" / "smollm2-135m" / "target.toml"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    rng = np.random.default_rng(0)
    tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.2, shape).astype(np.float32)
        for name, shape in expected_tensors(CONFIG).items()
    }
    tokenizer = TokenizerSpec([chr(i) for i in range(128)], [], [], None, [], "gpt2")
    return Checkpoint(CONFIG, tensors, tokenizer, None, "made by the test", "0" * 64)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.npz"
    np.savez(path, tokens=np.random.default_rng(1).integers(0, 128, 16 * 40 + 5).astype(np.uint16))
    return path


def weights(trainer: Trainer) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in trainer.student.named_parameters()}


def adversarial_values() -> np.ndarray:
    """Every midpoint and element of E2M1 with its float neighbours, both signs, and tiny and huge blocks."""
    points = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7.99], np.float32)
    near = np.concatenate([np.nextafter(points, np.float32(-9)), points, np.nextafter(points, np.float32(9))])
    block = np.concatenate([near, -near])  # 96 values
    rng = np.random.default_rng(2)
    wide = rng.normal(size=(64, 96)) * np.exp2(rng.integers(-100, 100, (64, 1)))
    scaled = block * np.exp2(np.arange(-60, 60, 7))[:, None]
    return np.concatenate([scaled, wide, np.zeros((1, 96))]).astype(np.float32)


def test_fake_quantized_weights_are_the_bytes_that_ship() -> None:
    values = adversarial_values()
    wanted = mx.quantize(values, "mxfp4", "search")
    linear = MXLinear(*values.shape)
    scale = search_scale(torch.from_numpy(values))
    linear.start(torch.from_numpy(values) / scale.repeat_interleave(32, 1), scale)
    got = linear.mx()
    assert np.array_equal(got.data, wanted.data)
    assert np.array_equal(got.scale[values.any(1)], wanted.scale[values.any(1)])
    read = linear(torch.eye(values.shape[1])).detach().numpy().T
    assert np.array_equal(read, mx.dequantize(wanted))


def test_fake_quantized_activations_are_the_runtimes() -> None:
    values = adversarial_values()
    values[3, :32] = np.linspace(-1.999, 1.999, 32)
    got = fake_quant_activations(torch.from_numpy(values)).numpy()
    assert np.array_equal(got, mx.dequantize_activations(*mx.quantize_activations(values)))


def test_gradients_pass_straight_through() -> None:
    linear = MXLinear(1, 32)
    linear.start(torch.full((1, 32), 2.4), torch.full((1, 1), 0.5))
    x = torch.arange(32.0)
    linear(x[None]).sum().backward()
    assert torch.equal(linear.weight.grad, 0.5 * x[None])
    y = x.clone().requires_grad_()
    (fake_quant_activations(y) * x).sum().backward()
    assert torch.equal(y.grad, x)


def test_distillation_loss_and_gradient_equal_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher, head = (torch.randn(n, 8, generator=generator) for n in (300, 300, 20))
    student.requires_grad_()
    loss = distillation_loss(student, teacher, head)
    (gradient,) = torch.autograd.grad(loss, student)
    log_student, log_teacher = (torch.log_softmax(h @ head.T, -1) for h in (student, teacher))
    plain = torch.nn.functional.kl_div(log_student, log_teacher, log_target=True, reduction="sum") / 300
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, student)[0])


def test_quality_of_the_teacher_itself_is_perfect() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(2, 5, 8, generator=generator), torch.randn(20, 8, generator=generator)
    tokens = torch.randint(0, 20, (2, 5), generator=generator)
    quality = measure_quality(hidden, hidden, head, tokens)
    nll = torch.nn.functional.cross_entropy((hidden @ head.T)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert (quality.kl, quality.agreement) == (0, 1)
    assert quality.perplexity == quality.teacher_perplexity == pytest.approx(float(nll.exp()), rel=1e-5)
    assert measure_quality(-hidden, hidden, head, tokens).kl > 0.1


def test_quality_is_the_one_that_numpy_measures() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 5, 8, generator=generator) for _ in range(2))
    head, own = (torch.randn(20, 8, generator=generator) for _ in range(2))
    tokens = torch.randint(0, 20, (2, 5), generator=generator)
    wanted = Quality(), Quality()
    for s, t, ids in zip(student, teacher, tokens.numpy(), strict=True):
        p, q = (log_softmax((h @ w.T).numpy()) for h, w in ((t, head), (s, own)))
        wanted[0].add(p, q, ids[1:])
        wanted[1].add(p, p, ids[1:])
    found = measure_quality(student, teacher, head, tokens, own)
    assert found.kl == pytest.approx(wanted[0].kl, rel=1e-5)
    assert found.agreement == wanted[0].agreement
    assert found.perplexity == pytest.approx(wanted[0].report()["perplexity"], rel=1e-5)
    assert found.teacher_perplexity == pytest.approx(wanted[1].report()["perplexity"], rel=1e-5)


def test_compensation_beats_rounding_on_correlated_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    inputs = torch.randn(512, 16, generator=generator) @ torch.randn(16, 64, generator=generator)
    inputs += 0.3 * torch.randn(512, 64, generator=generator)
    scale = search_scale(weight)
    grid = scale.repeat_interleave(32, 1)

    def error(latent: torch.Tensor) -> float:
        return float((inputs @ (round_e2m1(latent) * grid - weight).T).square().mean())

    assert error(compensate(weight, inputs, scale)) < 0.5 * error(weight / grid)


def test_compensation_makes_up_for_its_bounds() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    inputs = torch.randn(512, 16, generator=generator) @ torch.randn(16, 64, generator=generator)
    scale = search_scale(weight)
    grid = scale.repeat_interleave(32, 1)
    low, high = within_reach(weight, scale, 7.0)

    def error(latent: torch.Tensor) -> float:
        return float((inputs @ (round_e2m1(latent) * grid - weight).T).square().mean())

    bounded = compensate(weight, inputs, scale, (low, high))
    assert bool((low <= bounded).all() and (bounded <= high).all())
    afterwards = compensate(weight, inputs, scale).clamp(low.float(), high.float())
    assert error(bounded) < 0.8 * error(afterwards)


def test_reach_ends_at_the_last_element_that_is_near_enough() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    scale = search_scale(weight)
    grid = scale.repeat_interleave(32, 1)
    rounded = round_e2m1(weight / grid)
    base = mx.quantize(weight.numpy(), "mxfp4", "search")
    residual = mx.quantize_residual(weight.numpy() - mx.dequantize(base), base)
    largest = 6 * torch.exp2(torch.from_numpy(residual.scale).float() - 127).repeat_interleave(32, 1)
    low, high = (bound.float() for bound in within_reach(weight, scale, 6.0))
    for bound, outwards in ((low, -1), (high, 1)):
        assert torch.equal(round_e2m1(bound), bound)
        kept = (weight - bound * grid).abs() <= largest
        assert bool((kept | (bound == rounded)).all())
        beyond = round_e2m1(bound + outwards * (0.3 + bound.abs() / 4))
        lost = (weight - beyond * grid).abs() > largest
        assert bool((lost | (beyond == bound)).all())
    assert bool((low <= rounded).all() and (rounded <= high).all())
    assert 0.5 < float((low < high).float().mean()) < 1


def test_training_within_reach_spares_full_precision(
    checkpoint: Checkpoint, text: Path, tmp_path: Path
) -> None:
    def full_error(reach: float) -> float:
        """Squared error of base + residual after steps so large that most elements move."""
        trainer = Trainer(
            replace(RECIPE, lr=0.1, reach=reach), text.parent, checkpoint, tmp_path / f"{reach}"
        )
        trainer.run()
        total = 0.0
        for name, plane in trainer.trained_base().planes.items():
            left = checkpoint.tensors[name] - mx.dequantize(plane)
            total += float(np.square(left - mx.dequantize(mx.quantize_residual(left, plane))).sum())
        return total

    assert full_error(5.0) < 0.6 * full_error(0.0)


def test_quantized_student_is_the_dequantized_plane(checkpoint: Checkpoint) -> None:
    student = Llama(checkpoint)
    tokens = torch.arange(32).view(2, 16)
    start_quantized(student, "compensate", tokens)
    base = TrainedBase(student.planes(), student.norm_arrays(), {})
    dequantized = {name: mx.dequantize(plane) for name, plane in base.planes.items()}
    plain = Llama(replace(checkpoint, tensors=checkpoint.tensors | dequantized))
    assert torch.equal(student(tokens), plain(tokens))


def test_training_lowers_the_divergence(checkpoint: Checkpoint, text: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, start="round", steps=20, batch=38, lr=0.03)
    trainer = Trainer(recipe, text.parent, checkpoint, tmp_path / "run")
    divergence = [trainer.advance()[0] for _ in range(recipe.steps)]
    assert divergence[-1] < 0.7 * divergence[0]


def train_as_process(rank: int, directory: Path, text: Path, source: Checkpoint) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory / 'meet'}", rank=rank, world_size=2
    )
    Trainer(RECIPE, text.parent, source, directory).run()
    torch.distributed.destroy_process_group()


def test_two_processes_train_as_one(checkpoint: Checkpoint, text: Path, tmp_path: Path) -> None:
    """Gradients are summed in another order, so weights may differ: by less than a hundredth of a step."""
    (tmp_path / "two").mkdir()
    torch.multiprocessing.spawn(train_as_process, (tmp_path / "two", text, checkpoint), nprocs=2)
    one = Trainer(RECIPE, text.parent, checkpoint, tmp_path / "one")
    one.run()
    two = Trainer(RECIPE, text.parent, checkpoint, tmp_path / "two")
    assert two.step == RECIPE.steps
    difference = np.concatenate([np.abs(w - weights(two)[n]).ravel() for n, w in weights(one).items()])
    assert difference.mean() < 0.01 * RECIPE.lr
    assert two.evaluate()["text.npz"].kl == pytest.approx(one.evaluate()["text.npz"].kl, rel=0.01)


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"int8_activations": True},
        {"compute": "bf16"},
        {"dampen": 0.1},
        {"reach": 6.0},
        {"smoothing": 3},
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    checkpoint: Checkpoint, text: Path, tmp_path: Path, variant: dict[str, Any]
) -> None:
    recipe = replace(RECIPE, **variant)
    whole = Trainer(recipe, text.parent, checkpoint, tmp_path / "whole")
    whole.run()
    first = Trainer(recipe, text.parent, checkpoint, tmp_path / "parts")
    for _ in range(4):
        first.advance()
    first.save()
    second = Trainer(recipe, text.parent, checkpoint, tmp_path / "parts")
    assert second.step == 4
    second.run()
    for name, value in weights(whole).items():
        assert np.array_equal(value, weights(second)[name]), name


def test_a_recipe_becomes_a_delta(checkpoint: Checkpoint, text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in asdict(RECIPE).items()]
    recipe.write_text("\n".join(lines), encoding="utf-8")
    train_target(recipe, checkpoint, tmp_path / "run", tmp_path / "qat.delta")
    base = apply_delta(tmp_path / "qat.delta", checkpoint)
    trainer = Trainer(RECIPE, text.parent, checkpoint, tmp_path / "run")
    assert base.meta == trainer.trained_base().meta
    assert (base.meta["steps"], base.meta["recipe"]) == (RECIPE.steps, asdict(RECIPE))
    for name, linear in trainer.student.linears().items():
        assert np.array_equal(base.planes[name].data, linear.mx().data)
        assert np.array_equal(base.planes[name].scale, linear.mx().scale)
    assert all(
        np.array_equal(base.norms[name], norm.detach()) for name, norm in trainer.student.norms().items()
    )


def test_a_smoothed_run_trains_smoothed_weights(checkpoint: Checkpoint, text: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, start="round", smoothing=8)
    trainer = Trainer(recipe, text.parent, checkpoint, tmp_path / "run")
    base = trainer.trained_base()
    assert base.smoothing is not None
    assert base.smoothing.tokens == 8 * RECIPE.context
    smoothed = smooth(checkpoint, base.smoothing)
    for name, plane in base.planes.items():
        wanted = mx.quantize(smoothed.tensors[name], "mxfp4", "search")
        assert np.array_equal(plane.data, wanted.data), name
        assert not np.array_equal(plane.data, mx.quantize(checkpoint.tensors[name], "mxfp4", "search").data)
    (tmp_path / "run" / "smoothing.json").write_text("{}")
    with pytest.raises(RefusedError, match="is no smoothing"):
        Trainer(recipe, text.parent, checkpoint, tmp_path / "run")


def test_each_text_keeps_windows_that_never_train(checkpoint: Checkpoint, text: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", tokens=np.arange(16 * 10, dtype=np.uint16) % 128)
    recipe = replace(RECIPE, texts=["text.npz", "other.npz"])
    trainer = Trainer(recipe, text.parent, checkpoint, tmp_path / "run")
    assert {name: index.tolist() for name, index in trainer.held_out.items()} == {
        "text.npz": [38, 39],
        "other.npz": [48, 49],
    }
    assert trainer.trained.tolist() == [*range(38), *range(40, 48)]
    assert {name.split()[0] for name in trainer.results()} == {"text", "other"}


@pytest.mark.filterwarnings("ignore")  # torch warns itself while it compiles
def test_compiled_training_is_the_same_training(checkpoint: Checkpoint, text: Path, tmp_path: Path) -> None:
    """But for the order of sums and fewer roundings to bf16 on the way."""
    recipe = replace(RECIPE, compute="bf16", int8_activations=True)
    plain = Trainer(recipe, text.parent, checkpoint, tmp_path / "plain")
    compiled = Trainer(replace(recipe, compile=True), text.parent, checkpoint, tmp_path / "compiled")
    losses = [[trainer.advance()[0] for _ in range(3)] for trainer in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    exact = Trainer(replace(recipe, compute="f32"), text.parent, checkpoint, tmp_path / "exact")
    assert losses[1] == pytest.approx([exact.advance()[0] for _ in range(3)], rel=0.05)


def test_oscillation_counts_codes_that_return(checkpoint: Checkpoint, text: Path, tmp_path: Path) -> None:
    trainer = Trainer(replace(RECIPE, start="round"), text.parent, checkpoint, tmp_path / "run")
    latent = trainer.student.model.layers[0].mlp.up_proj.weight.data
    count = sum(m.weight.numel() for m in trainer.student.linears().values())
    values = [2.0, 3.0, 2.0]
    for value in values:
        latent[0, 0] = value
        statistics = trainer.weight_statistics()
    assert statistics["changed"] == pytest.approx(1 / count)
    assert statistics["oscillating"] == pytest.approx(1 / count)


def test_a_damaged_training_checkpoint_is_refused(checkpoint: Checkpoint, text: Path, tmp_path: Path) -> None:
    trainer = Trainer(RECIPE, text.parent, checkpoint, tmp_path / "run")
    trainer.save()
    path = tmp_path / "run" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(RefusedError, match=r"checkpoint\.pt does not continue this run"):
        Trainer(RECIPE, text.parent, checkpoint, tmp_path / "run")


def test_sensitivity_names_the_layer_that_suffers(checkpoint: Checkpoint) -> None:
    tensors = dict(checkpoint.tensors)
    for name, weight in checkpoint.tensors.items():
        if name.startswith("model.layers.0.") and weight.ndim == 2:  # already on the grid: nothing to lose
            tensors[name] = mx.dequantize(mx.quantize(weight, "mxfp4", "search"))
    source = replace(checkpoint, tensors=tensors)
    asked = groups(source, [by_layer, by_kind])
    found = {s.group: s for s in sensitivity(source, torch.arange(32).view(2, 16), "round", asked)}
    assert list(found) == [
        *("layers.0", "layers.1", *(f"self_attn.{k}_proj" for k in "qkvo")),
        *(f"mlp.{kind}_proj" for kind in ("gate", "up", "down")),
        *("all layers", "embedding", "head"),
    ]
    divergence = {group: s.quality.kl for group, s in found.items()}
    assert divergence["layers.0"] == pytest.approx(0, abs=1e-6)
    # Each group is measured alone: among the layers, only layer 1 has anything to lose.
    assert divergence["layers.1"] == pytest.approx(divergence["all layers"], rel=1e-3)
    assert min(divergence["layers.1"], divergence["embedding"], divergence["head"]) > 1e-3
    head = found["head"]
    assert (head.mxfp4_bytes, head.mxint8_bytes) == (128 * 64 * 17 // 32, 128 * 64 * 33 // 32)
    assert head.kl_per_mib == pytest.approx(divergence["head"] / (128 * 64 / 2) * 2**20)


def test_windows_are_cut_and_loops_are_seen(tmp_path: Path, text: Path) -> None:
    windows = read_windows(text, 16, 128)
    assert windows.shape == (40, 16)
    assert repetition(np.arange(16)) == 0
    assert repetition(np.tile(np.arange(4), 4)) == 1 - 4 / 13
    with pytest.raises(RefusedError, match="outside the vocabulary"):
        read_windows(text, 16, 50)
    with pytest.raises(RefusedError, match=r"missing\.npz: no such file"):
        read_windows(tmp_path / "missing.npz", 16, 128)


def test_rate_rises_stays_and_falls() -> None:
    recipe = replace(RECIPE, steps=20, warmup=3, cooldown=9)
    rates = [recipe.rate(step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1]
    assert rates[4:12] == [1] * 8
    assert rates[12] == pytest.approx(2 / 3)  # one of nine steps down: 1 - sqrt(1/9)
    assert rates[15] == pytest.approx(1 / 3)
    assert all(a > b > 0 for a, b in itertools.pairwise(rates[11:]))


@pytest.mark.parametrize("name", ["target.toml", "target-gpu.toml"])
def test_the_shipped_recipes_read(name: str) -> None:
    assert read_recipe(RECIPE_TOML.with_name(name), Recipe).start == "compensate"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("steps = ", "stops = "), "unknown key 'stops'"),
        (("steps = ", "# "), "key 'steps' is missing"),
        (('start = "compensate"', 'start = "magic"'), "start = 'magic' is none of round, compensate"),
        (("batch = ", "batch = -"), r"batch = -\d+ is negative"),
        (("lr = ", 'lr = "fast" #'), "lr = 'fast' is not of type float"),
    ],
)
def test_recipe_faults_are_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE_TOML.read_text(encoding="utf-8").replace(*change, 1), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_recipe(path, Recipe)


def test_evaluate_sensitivity(tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.save_huggingface(tiny.checkpoint(), tmp_path / "weights")
    options = [str(tmp_path / "weights"), "--text", str(text), "--tokens", "40", "--ctx", "16"]
    options += ["--start", "compensate"]
    options += ["--json", str(tmp_path / "s.json"), "--plot", str(tmp_path / "s.png")]
    cli.main(["evaluate", "sensitivity", *options], standalone_mode=False)
    found = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert found["tokens"] == 32
    rows = {row["group"]: row for row in found["results"]}
    assert rows["all layers"]["kl"] > rows["layers.0"]["kl"] > 0
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"
    out, err = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["all", "embedding", "head"]
    assert f"{len(rows)}/{len(rows)} head: KL" in err
