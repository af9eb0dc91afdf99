# SPDX-License-Identifier: Apache-2.0
"""Drafter training: the torch side equals the exported graphs, learns, resumes exactly, and sees only the
past."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")


import onnxruntime  # noqa: E402
import tiny  # noqa: E402
from mxdraft import mx  # noqa: E402
from mxdraft.bundle import Bundle  # noqa: E402
from mxdraft.checkpoint import load_checkpoint  # noqa: E402
from mxdraft.cli import cli  # noqa: E402
from mxdraft.errors import RefusedError, UsageError  # noqa: E402
from mxdraft.export import OnnxRunner, export_drafter, export_model  # noqa: E402
from mxdraft.measure.acceptance import Rollout  # noqa: E402
from mxdraft.measure.draft_table import draft_tables, rollout_features  # noqa: E402
from mxdraft.pack import pack  # noqa: E402
from mxdraft.runtime import Engine, Model, Timeline  # noqa: E402
from mxdraft.train.corpus import Corpus, Document  # noqa: E402
from mxdraft.train.cotrain import CoTrainer, train_together, trainable_base  # noqa: E402
from mxdraft.train.delta import apply_delta  # noqa: E402
from mxdraft.train.draft_model import restored  # noqa: E402
from mxdraft.train.draft_train import (  # noqa: E402
    DraftTrainer,
    confidence,
    extra_rows,
    fit_confidence,
    soft_cross_entropy,
    train_drafter,
)
from mxdraft.train.drafter import load_drafter, save_drafter  # noqa: E402
from mxdraft.train.features import Features, bundle_target  # noqa: E402
from mxdraft.train.model import Llama  # noqa: E402
from mxdraft.train.recipe import DraftRecipe, read_recipe  # noqa: E402

RECIPE = DraftRecipe(
    target="base", target_lr=0.0, draft_weight=0.0, reach=0.0,
    texts=["text.npz"], share=1.0, held_out=4, feature_layers=[1, 2, 4], vocab=64, ridge=8,
    unroll_at=[0, 2, 4], unroll_decay=0.8, batch=256, quantize_at=5, quantized_lr=1e-3, weight_decay=0.01,
    compute="f32", steps=8, lr=1e-4, norm_lr=1e-4, warmup=1, cooldown=3, beta1=0.9, beta2=0.98,
    gradient_clip=1.0, latent_clip=8.0, seed=0, log_every=1, evaluate_every=4, checkpoint_every=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fixture T as ONNX files and bundle, and text.npz, greedy by T itself from seeded beginnings."""
    folder = tmp_path_factory.mktemp("target")
    checkpoint = tiny.checkpoint()
    export_model(checkpoint, folder)
    pack(folder, folder / "t.mxb")
    rng = np.random.default_rng(0)
    runner = OnnxRunner(folder / "model.base.onnx")
    corpus = Corpus()
    for number in range(24):
        start = rng.integers(3, 500, 8).tolist()
        tokens = np.array(start + runner.generate_greedy(start, 20), np.uint16)
        corpus.documents[number] = Document(tokens, 8, 0.0)
    corpus.save(folder / "text.npz")
    return folder


@pytest.fixture(scope="module")
def target(folder: Path):
    return bundle_target(Bundle.open(folder / "t.mxb"), "base")


def weights(trainer: DraftTrainer) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("precision", ["base", "full"])
def test_the_target_in_torch_is_the_exported_graph(folder: Path, precision: str) -> None:
    target = bundle_target(Bundle.open(folder / "t.mxb"), precision)
    ids = list(range(5, 45))
    wanted = OnnxRunner(folder / f"model.{precision}.onnx").logits(ids)
    got = target(torch.tensor([ids]))[0] @ target.head.T
    # int8 activations may round to the next step where sums differ in their last bits.
    assert np.abs(got.numpy() - wanted).max() < 0.03 * np.abs(wanted).max()
    assert (got.numpy().argmax(-1) == wanted.argmax(-1)).mean() > 0.9


def test_one_small_step_downhill_lowers_the_loss(folder: Path, target, tmp_path: Path) -> None:
    trainer = DraftTrainer(RECIPE, folder, target, folder / "t.mxb", tmp_path)
    batch = trainer.groups[0]

    def loss() -> torch.Tensor:
        return sum(soft_cross_entropy(rows.wanted, rows.given) for rows in trainer.rows(batch, 3))

    before = loss()
    before.backward()
    slope = 0.0
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            slope += float(parameter.grad.square().sum())
        before = float(before.detach())
        size = 0.02 * before / slope
        for parameter in trainer.model.parameters():
            parameter -= size * parameter.grad
        after = float(loss())
    assert after - before == pytest.approx(-size * slope, rel=0.5)


def test_training_lowers_the_loss_and_weights_move(folder: Path, target, tmp_path: Path) -> None:
    recipe = replace(RECIPE, unroll_at=[0], steps=40, quantize_at=20, lr=1e-3, quantized_lr=0.02, batch=1024)
    trainer = DraftTrainer(recipe, folder, target, folder / "t.mxb", tmp_path)
    losses = [trainer.advance()[0] for _ in range(recipe.steps)]
    assert losses[19] < 0.9 * losses[0]
    assert losses[39] < losses[20]


@pytest.mark.parametrize("stop", [2, 6])  # before and after the weights are read through MXFP4
def test_a_resumed_run_equals_an_uninterrupted_one(folder: Path, target, tmp_path: Path, stop: int) -> None:
    whole = DraftTrainer(RECIPE, folder, target, folder / "t.mxb", tmp_path / "whole")
    whole.run()
    first = DraftTrainer(RECIPE, folder, target, folder / "t.mxb", tmp_path / "parts")
    for _ in range(stop):
        first.advance()
    first.save()
    second = DraftTrainer(RECIPE, folder, target, folder / "t.mxb", tmp_path / "parts")
    assert second.step == stop
    second.run()
    for name, value in weights(whole).items():
        assert np.array_equal(value, weights(second)[name]), name


def train_as_process(rank: int, recipe: DraftRecipe, directory: Path, folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory / 'meet'}", rank=rank, world_size=2
    )
    target = bundle_target(Bundle.open(folder / "t.mxb"), "base")
    DraftTrainer(recipe, folder, target, folder / "t.mxb", directory).run()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("quantize_at", "peak"), [(RECIPE.steps, RECIPE.lr), (0, RECIPE.quantized_lr)])
def test_two_processes_train_as_one(
    folder: Path, target, tmp_path: Path, quantize_at: int, peak: float
) -> None:
    """Gradients are summed in another order, which Adam turns into steps where gradients are nearly zero; the
    mean difference stays below a third of a step. f32 and MXFP4 are tested separately: in between, each block
    gets its exponent, and where weights are nearly zero the last bits choose it."""
    recipe = replace(RECIPE, quantize_at=quantize_at)
    (tmp_path / "two").mkdir()
    torch.multiprocessing.spawn(train_as_process, (recipe, tmp_path / "two", folder), nprocs=2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes have: threads decide the order in which products are summed
    one = DraftTrainer(recipe, folder, target, folder / "t.mxb", tmp_path / "one")
    one.run()
    torch.set_num_threads(threads)
    two = DraftTrainer(recipe, folder, target, folder / "t.mxb", tmp_path / "two")
    assert two.step == recipe.steps
    difference = np.concatenate([np.abs(w - weights(two)[n]).ravel() for n, w in weights(one).items()])
    assert difference.mean() < peak / 3
    assert two.results()["loss"] == pytest.approx(one.results()["loss"], rel=0.01)


@pytest.fixture(scope="module")
def trained(folder: Path, target, tmp_path_factory: pytest.TempPathFactory) -> DraftTrainer:
    trainer = DraftTrainer(RECIPE, folder, target, folder / "t.mxb", tmp_path_factory.mktemp("run"))
    trainer.run()
    return trainer


def test_graphs_and_bundle_are_the_trained_drafter(
    folder: Path, target, trained: DraftTrainer, tmp_path: Path
) -> None:
    """A chain by the exported graphs, row by row with its cache, gives what the unrolled loss saw."""
    save_drafter(tmp_path / "drafter.npz", trained.trained("0" * 64))
    drafter = load_drafter(tmp_path / "drafter.npz", target.config)
    export_drafter(drafter, folder)
    pack(folder, tmp_path / "t.mxb")
    bundle = Bundle.open(tmp_path / "t.mxb")
    for name, linear in trained.model.linears().items():
        assert np.array_equal(bundle.get("draft.weights", name).data, linear.mx().data)
    assert np.array_equal(bundle.get("draft.weights", "draft_ids")[0], trained.ids)

    residuals, tokens = trained.padded(trained.held_out[:1])
    read = restored(drafter, target.config)(target, residuals, tokens, 3)
    wanted = [hidden[0] @ target.head[trained.ids].T for hidden in read]
    features, step = (
        onnxruntime.InferenceSession(folder / name) for name in ("draft.features.onnx", "draft.step.onnx")
    )
    (states,) = features.run(None, {"residuals": residuals.numpy()})
    cache = [np.empty((1, 2, 0, 32), np.float32)] * 2
    chain = 12

    def advance(ids: np.ndarray, state: np.ndarray, cache: list[np.ndarray]) -> list[np.ndarray]:
        past = cache[0].shape[2]
        names = [value.name for value in step.get_inputs()]
        positions = np.arange(past, past + ids.shape[1])[None]
        return step.run(None, dict(zip(names, [ids, positions, state, *cache], strict=True)))

    following = tokens.numpy()[:, 1:]
    logits, state, *cache = advance(following[:, : chain + 1], states[:, : chain + 1], cache)
    assert closeness(logits[0], wanted[0][: chain + 1]) < 0.03
    for depth in (1, 2):
        place = chain + depth
        logits, state, *cache = advance(following[:, place : place + 1], state[:, -1:], cache)
        assert closeness(logits[0], wanted[depth][chain : chain + 1]) < 0.03


def closeness(a: np.ndarray, b: torch.Tensor) -> float:
    """Largest difference relative to the largest value: int8 activations may round to the next step where
    sums differ in their last bits."""
    return float(np.abs(a - b.detach().numpy()).max() / np.abs(a).max())


def test_chains_see_nothing_after_their_tokens(target, trained: DraftTrainer) -> None:
    residuals, tokens = trained.padded(trained.held_out[:1])
    before = trained.model(target, residuals, tokens, 3)
    place = 14
    residuals, tokens = residuals.clone(), tokens.clone()
    residuals[:, place + 1 :] += 1
    tokens[:, place + 4 :] = 7
    after = trained.model(target, residuals, tokens, 3)
    for step, (a, b) in enumerate(zip(before, after, strict=True), start=1):
        assert torch.equal(a[:, : place + 1], b[:, : place + 1]), step
    assert not torch.equal(before[0][:, place + 1 :], after[0][:, place + 1 :])


TOGETHER = replace(RECIPE, target_lr=0.1, draft_weight=0.3, evaluate_every=8)


def together(recipe: DraftRecipe, folder: Path, directory: Path) -> CoTrainer:
    target = trainable_base(Bundle.open(folder / "t.mxb"))
    return CoTrainer(recipe, folder, target, folder / "t.mxb", Llama(tiny.checkpoint()), directory)


def test_training_together_lowers_both_losses(folder: Path, tmp_path: Path) -> None:
    recipe = replace(TOGETHER, unroll_at=[0], steps=24, quantize_at=12, lr=1e-3, batch=1024)
    trainer = together(recipe, folder, tmp_path)

    @torch.no_grad()
    def losses() -> tuple[float, float]:
        """Losses of drafter and target on the training text."""
        (batch,) = trainer.groups
        streams, tokens = trainer.padded(batch)
        loss, count = trainer.draft_loss(batch, streams, tokens)
        return float(loss / count), float(trainer.divergence(batch, streams, tokens))

    before = losses()
    trainer.run()
    after = losses()
    assert after[0] < 0.8 * before[0]
    assert after[1] < 0.6 * before[1]


def test_the_drafters_loss_reaches_the_target(folder: Path, tmp_path: Path) -> None:
    """The drafter's gradient in the base plane is ``draft_weight`` times what autograd finds without that
    weight, and none of it comes through the tokens that the drafter should predict."""
    gradients = {}
    for weight in (0.0, 0.5, 1.0):
        trainer = together(replace(TOGETHER, draft_weight=weight), folder, tmp_path / f"{weight}")
        trainer.loss(trainer.groups[0])[0].backward()
        latents = trainer.latents
        gradients[weight] = torch.cat([latent.grad.flatten() for latent in latents])
    residuals, tokens = trainer.padded(trainer.groups[0])
    loss, _ = trainer.draft_loss(trainer.groups[0], residuals, tokens)
    alone = torch.cat([g.flatten() for g in torch.autograd.grad(loss, latents)])
    assert float(alone.norm()) > 0
    torch.testing.assert_close(gradients[1.0] - gradients[0.0], alone, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(gradients[0.5] - gradients[0.0], alone / 2, rtol=1e-3, atol=1e-3)
    streams = residuals.detach().requires_grad_()
    for rows in trainer.compare(trainer.groups[0], streams, tokens, 2):
        assert not rows.wanted.requires_grad


@pytest.mark.parametrize("stop", [2, 6])
def test_training_together_resumes_exactly(folder: Path, tmp_path: Path, stop: int) -> None:
    recipe = replace(TOGETHER, reach=6.0)
    whole = together(recipe, folder, tmp_path / "whole")
    whole.run()
    first = together(recipe, folder, tmp_path / "parts")
    for _ in range(stop):
        first.advance()
    first.save()
    second = together(recipe, folder, tmp_path / "parts")
    assert second.step == stop
    second.run()
    for name, value in weights(whole).items():
        assert np.array_equal(value, weights(second)[name]), name
    start = trainable_base(Bundle.open(folder / "t.mxb"))
    moved = 0
    for a, b, c in zip(whole.latents, second.latents, start.linears().values(), strict=True):
        assert torch.equal(a, b)
        moved += int((a != c.weight).sum())
    assert moved > 0


def test_a_recipe_becomes_drafter_and_delta(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny.checkpoint()
    tiny.save_huggingface(checkpoint, tmp_path / "weights")
    source = load_checkpoint(tmp_path / "weights")
    export_model(source, tmp_path / "onnx")
    pack(tmp_path / "onnx", tmp_path / "t.mxb")
    recipe = folder / "together.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in asdict(TOGETHER).items()]
    recipe.write_text("\n".join(lines), encoding="utf-8")
    options = ["train", "drafter", "-m", str(tmp_path / "t.mxb"), "--recipe", str(recipe)]
    options += ["--run", str(tmp_path / "run"), "-o", str(tmp_path / "d.npz")]
    with pytest.raises(UsageError, match="give --weights and --delta"):
        cli.main(options, standalone_mode=False)
    options += ["--weights", str(tmp_path / "weights"), "--delta", str(tmp_path / "qat.delta")]
    cli.main(options, standalone_mode=False)
    assert "target_kl" in capfd.readouterr().err
    base = apply_delta(tmp_path / "qat.delta", source)
    assert base.meta["recipe"] == asdict(TOGETHER)
    rounded = {name: mx.quantize(source.tensors[name], "mxfp4", "search") for name in base.planes}
    assert any((plane.data != rounded[name].data).any() for name, plane in base.planes.items())
    assert load_drafter(tmp_path / "d.npz", source.config).source_sha256 == source.source_sha256
    with pytest.raises(RefusedError, match="was made of the weights with SHA-256"):
        train_together(recipe, folder / "t.mxb", source, tmp_path, tmp_path / "d", tmp_path / "q")
    recipe.write_text("\n".join(lines).replace('"base"', '"full"'), encoding="utf-8")
    with pytest.raises(UsageError, match='training both asks for target = "base"'):
        cli.main(options, standalone_mode=False)


def test_a_recipe_becomes_a_drafter(folder: Path, target, trained: DraftTrainer, tmp_path: Path) -> None:
    recipe = folder / "recipe.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in asdict(RECIPE).items()]
    recipe.write_text("\n".join(lines), encoding="utf-8")
    told = []
    train_drafter(recipe, folder / "t.mxb", tmp_path, tmp_path / "d.npz", lambda *pair: told.append(pair))
    drafter = load_drafter(tmp_path / "d.npz", target.config)
    assert told[-1] == (24 * 28, 24 * 28)
    assert drafter.meta == trained.trained("0" * 64).meta
    assert (drafter.meta["steps"], drafter.meta["recipe"]) == (8, asdict(RECIPE))
    for name, linear in trained.model.linears().items():
        assert np.array_equal(drafter.planes[name].data, linear.mx().data)
    assert len(drafter.calibration) == 3


def test_a_drafter_may_learn_from_full_precision(folder: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, target="full", share=0.5)
    lines = [f"{key} = {json.dumps(value)}" for key, value in asdict(recipe).items()]
    (folder / "full.toml").write_text("\n".join(lines), encoding="utf-8")
    told = []
    train_drafter(
        folder / "full.toml", folder / "t.mxb", tmp_path, tmp_path / "d.npz", lambda *pair: told.append(pair)
    )
    assert told[-1] == (14 * 28, 14 * 28)  # half of 20 documents and the 4 held out: no more is computed
    full = bundle_target(Bundle.open(folder / "t.mxb"), "full")
    document = Corpus.load(folder / "text.npz").documents[0].tokens.astype(np.int64)
    streams = np.load(tmp_path / "text.full.npy")[:28]
    with (
        Model(folder / "t.mxb") as model,
        Engine(model, threads=1, precision="full") as engine,
        Timeline(engine) as timeline,
    ):
        wanted = timeline.streams(document.tolist(), recipe.feature_layers)
    assert np.array_equal(streams, wanted.astype(np.float16))
    (in_torch,) = full.residuals(torch.from_numpy(document)[None], [4])
    assert np.std(streams[:, 2] - in_torch[0].numpy()) < 0.05 * np.std(wanted[:, 2])


def test_features_of_some_documents(folder: Path, tmp_path: Path) -> None:
    """Numbers of other corpora are left out."""
    documents = [Corpus.load(folder / "text.npz").documents[i].tokens for i in range(4)]
    features = Features(folder / "t.mxb", "base", [4], documents, tmp_path / "f.npy")
    told = []
    features.compute(told.append, [-1, 1, 3, 4, 99])
    assert told == [28, 28]
    assert [bool(features.of(i).any()) for i in range(4)] == [False, True, False, True]
    features.compute(told.append)
    assert len(told) == 4


def test_extra_rows_are_the_tokens_seen_so_far() -> None:
    tokens = torch.tensor([[5, 9, 5, 7, 9], [7, 3, 3, 3, 3]])
    extra, first = extra_rows(tokens, torch.tensor([3, 5]))
    assert extra.tolist() == [7, 9]
    assert first.tolist() == [[3, 1], [0, 5]]
    assert extra_rows(tokens[1:, 1:], torch.tensor([3]))[0].tolist() == []


def test_soft_cross_entropy_leaves_out_what_is_barred() -> None:
    wanted, given = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    barred = torch.tensor([0, 0, 0, 0, 1, 1]).bool()
    loss = soft_cross_entropy(wanted.masked_fill(barred, -torch.inf), given.masked_fill(barred, -torch.inf))
    plain = torch.nn.functional.cross_entropy(given[:, :4], wanted[:, :4].softmax(-1), reduction="sum")
    torch.testing.assert_close(loss, plain)


def test_confidence_is_calibrated_by_the_fit() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4000, 20, generator=generator)
    truth = 1 / (1 + 2.5 / (confidence(logits, 0.6, 1.0).reciprocal() - 1).reciprocal())
    hit = torch.rand(4000, generator=generator) < truth
    inverse_temperature, odds = fit_confidence([logits[:1000], logits[1000:]], hit)
    assert inverse_temperature == pytest.approx(0.6, rel=0.15)
    assert odds == pytest.approx(2.5, rel=0.25)
    softmax = torch.softmax(0.6 * logits, -1).amax(-1)
    torch.testing.assert_close(confidence(logits, 0.6, 1.0), softmax)


def test_foreign_and_damaged_drafters_are_refused(
    folder: Path, target, trained: DraftTrainer, tmp_path: Path
) -> None:
    path = tmp_path / "drafter.npz"
    save_drafter(path, trained.trained("1" * 64))
    with pytest.raises(RefusedError, match="was trained for weights"):
        export_drafter(load_drafter(path, target.config), folder)
    with pytest.raises(RefusedError, match="not a drafter for this model"):
        load_drafter(path, replace(target.config, hidden=192))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(RefusedError, match="not a drafter for this model"):
        load_drafter(path, target.config)


@pytest.mark.parametrize("name", ["drafter.toml", "drafter-gpu.toml"])
def test_the_shipped_recipes_read(name: str) -> None:
    folder = Path(__file__).parents[1] / "models" / "smollm2-135m"
    recipe = read_recipe(folder / name, DraftRecipe)
    assert recipe.quantize_at < recipe.steps
    assert all((folder / text).exists() for text in recipe.texts)


def test_evaluate_acceptance(
    folder: Path, trained: DraftTrainer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [{"task": task, "turns": [f"What is {n}?"]} for n in range(3) for task in ("chat", "qa")]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    save_drafter(tmp_path / "drafter.npz", trained.trained("0" * 64))
    options = ["-m", str(folder / "t.mxb"), "--drafter", f"mine={tmp_path / 'drafter.npz'}"]
    options += ["--prompts", str(prompts), "--run", str(tmp_path / "run"), "-n", "12", "--depth", "3"]
    options += ["--drafter", f"again={tmp_path / 'drafter.npz'}"]
    options += ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    cli.main(["evaluate", "acceptance", *options], standalone_mode=False)
    written = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    measures = ["alpha_everywhere", "tau 1", "tau 2", "tau 3"]
    assert written["gains"]["again"]["chat"] == {measure: [0, 0, 0] for measure in measures}
    found = written["results"]["mine"]
    assert {"all", "chat", "qa"} <= found.keys()
    assert found["all"]["drafter"]["rollouts"] == 6
    assert all(1 <= tau <= 4 for tau in found["all"]["union"]["tau"].values())
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    out = capfd.readouterr().out
    assert "mine" in out
    assert "again - mine" in out


def test_proposals_are_what_a_chain_would_draft(folder: Path, target, trained: DraftTrainer) -> None:
    """With the target's own next token as text, a table's first column is the drafter's likeliest token."""
    document = trained.documents[trained.held_out[0]]
    rollout = Rollout("chat", document.tokens, document.answer_start, 0.0, 0)
    features = rollout_features(folder / "t.mxb", RECIPE.feature_layers, [rollout], folder / "rollout.npy")
    calibration = ((0.9, 1.1), (0.8, 1.2))  # the last one serves the third step too
    (found,) = draft_tables(trained.model, trained.ids, calibration, target, features, [rollout], 3)
    table = found.tokens
    assert table.shape == (len(document.tokens) - document.answer_start, 3)
    rows = trained.rows(trained.held_out[:1], 3)
    extra, _ = extra_rows(torch.from_numpy(document.tokens.astype(np.int64))[None], trained.ids)
    candidates = torch.cat([trained.ids, extra])
    for step, asked in enumerate(rows):
        wanted = candidates[asked.given.argmax(-1)]
        assert table[: len(wanted), step].tolist() == wanted.tolist()
        sure = confidence(asked.given, *calibration[min(step, 1)]).detach().numpy()
        np.testing.assert_allclose(found.confidence[: len(wanted), step], sure, rtol=1e-4)
