# SPDX-License-Identifier: Apache-2.0
"""Training of a drafter: soft cross-entropy to what a frozen target says, with the draft loop unrolled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch.nn import functional as F

from mxdraft.bundle import Bundle
from mxdraft.errors import UsageError
from mxdraft.train.corpus import Corpus, Document
from mxdraft.train.data import epoch_order
from mxdraft.train.draft_model import DraftModel, draft_vocabulary
from mxdraft.train.drafter import TrainedDrafter, save_drafter
from mxdraft.train.fakequant import MXLinear
from mxdraft.train.features import Features, batches, bundle_target
from mxdraft.train.model import Llama
from mxdraft.train.recipe import DraftRecipe, read_recipe
from mxdraft.train.run import TrainingRun, adamw


def train_drafter(
    recipe: Path, bundle: Path, directory: Path, output: Path, progress: Callable[[int, int], None]
) -> None:
    """Train a drafter for a precision of ``bundle`` by the file ``recipe``, from where ``directory`` stands,
    and write it. ``progress``: of the target's features, tokens done and in all."""
    settings = read_recipe(recipe, DraftRecipe)
    if settings.target_lr:
        raise UsageError(f"recipe {recipe}: target_lr trains the target too: give --weights and --delta")
    opened = Bundle.open(bundle)
    target = bundle_target(opened, settings.target)
    trainer = DraftTrainer(settings, recipe.parent, target, bundle, directory, progress)
    trainer.run()
    if trainer.rank == 0:
        save_drafter(output, trainer.trained(opened.provenance["source_sha256"]))


@dataclass(frozen=True)
class Rows:
    """What is asked for at n places of a batch: logits [n, rows] that the target (``wanted``) and the drafter
    (``given``) have over the draft vocabulary and the extra rows; those not allowed are −inf."""

    wanted: Tensor
    given: Tensor


class DraftTrainer(TrainingRun):
    """A drafter in training; the directory also keeps the target's features."""

    def __init__(
        self,
        recipe: DraftRecipe,
        texts: Path,
        target: Llama,
        bundle: Path,
        directory: Path,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """``target``: the network in ``bundle``; ``texts``: directory to which the recipe's are relative."""
        super().__init__(recipe, directory)
        self.recipe = recipe
        self.bundle = bundle
        self.depth = len(recipe.unroll_at)  # draft steps that are evaluated and calibrated
        self.target = target.to(self.device)
        config = target.config
        if recipe.feature_layers != sorted(set(recipe.feature_layers)) or (
            recipe.feature_layers[-1] != config.layers
        ):
            raise UsageError(f"feature_layers {recipe.feature_layers} do not ascend to {config.layers}")
        corpora = [Corpus.load(texts / name) for name in recipe.texts]
        self.documents: list[Document] = []
        self.held_out: list[int] = []
        trained: list[int] = []
        for corpus in corpora:
            numbers = range(len(self.documents), len(self.documents) + len(corpus.documents))
            self.documents += [corpus.documents[number] for number in sorted(corpus.documents)]
            trained += numbers[: -recipe.held_out]
            self.held_out += numbers[-recipe.held_out :]
        self.training = trained[: round(recipe.share * len(trained))]
        if len(self.training) < recipe.ridge:
            raise UsageError(f"{len(self.training)} documents to train are fewer than ridge = {recipe.ridge}")
        self.features = self.compute_features(corpora, progress)
        self.groups = self.grouped(self.training)
        if min(map(len, self.groups)) < self.processes:
            raise UsageError(f"a batch of {recipe.batch} tokens holds fewer than {self.processes} documents")
        self.model = DraftModel(config, len(recipe.feature_layers)).to(self.device)
        answers = [torch.from_numpy(self._answer(i).astype(np.int64)) for i in self.training]
        self.ids = draft_vocabulary(answers, config.vocab, recipe.vocab).to(self.device)
        self.quantized = False
        self.optimizer = self._optimizer()
        if not self.resume():
            sample = [self.training[i] for i in epoch_order(np.arange(len(self.training)), 0, recipe.seed)]
            self.model.start(self.target, [self.read(i) for i in sample[: recipe.ridge]])
            self.share(self.model)

    # ---- one step ----

    def advance(self) -> tuple[float, float]:
        if self.step == self.recipe.quantize_at:
            self._quantize()
        batch = self._batch(self.step)[self.rank :: self.processes]
        for optimizer, _ in self.optimizers():
            optimizer.zero_grad()
        with self.compute():
            loss, count = self.loss(batch)
        loss.backward()
        loss = loss.detach()
        gradients = [p.grad for _, trained in self.optimizers() for p in trained if p.grad is not None]
        self.sum_over_processes([loss, count, *gradients])
        for gradient in gradients:
            gradient /= count
        norms = [self.descend(optimizer, trained) for optimizer, trained in self.optimizers()]
        self.clamp_latents()
        self.step += 1
        return float(loss / count), norms[0]

    def loss(self, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the sum over the places of a batch, and their number."""
        return self.draft_loss(batch, *self.padded(batch))

    def draft_loss(self, batch: Sequence[int], residuals: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the drafter's loss over the places of a batch, draft steps weighted, and the number of
        places."""
        depth = sum(self.step >= start for start in self.recipe.unroll_at)
        weights = [self.recipe.unroll_decay**j for j in range(depth)]
        loss = torch.zeros((), device=self.device)
        steps = self.compare(batch, residuals, tokens, depth)
        for weight, rows in zip(weights, steps, strict=True):
            loss = loss + weight / sum(weights) * soft_cross_entropy(rows.wanted, rows.given.float())
        return loss, torch.tensor(float(len(steps[0].wanted)), device=self.device)

    def rows(self, batch: Sequence[int], depth: int) -> list[Rows]:
        """Ask target and drafter at every place of the batch's answers, for each draft step."""
        return self.compare(batch, *self.padded(batch), depth)

    def compare(self, batch: Sequence[int], residuals: Tensor, tokens: Tensor, depth: int) -> list[Rows]:
        """Return ``rows`` for a batch whose streams and tokens are at hand; the target's words carry no
        gradient."""
        read = self.model(self.target, residuals, tokens, depth)
        extra, seen = extra_rows(tokens, self.ids)
        head = self.target.head[torch.cat([self.ids, extra])]
        wanted = self.target.read_by_head(residuals[:, :, -1].detach()) @ head.T
        found = []
        for step, hidden in enumerate(read, start=1):
            row, chain = self.places(batch, step)
            # Of tokens drafted since, none is in the context that does not lie in the vocabulary anyway.
            barred = seen[row] > (chain + 1)[:, None]
            barred = F.pad(barred, (len(self.ids), 0))
            asked = wanted[row, chain + step].masked_fill(barred, -torch.inf)
            given = (hidden[row, chain] @ head.T).masked_fill(barred, -torch.inf)
            found.append(Rows(asked, given))
        return found

    def places(self, batch: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
        """Return (place in the batch, position where the chain starts) of every chain within an answer
        that is long enough for a ``step``-th token; what that should be the target says at position start
        + step."""
        rows, chains = [], []
        for row, number in enumerate(batch):
            document = self.documents[number]
            starts = np.arange(document.answer_start - 1, len(document.tokens) - 1 - step)
            rows.append(np.full(len(starts), row))
            chains.append(starts)
        places = (torch.from_numpy(np.concatenate(parts)).to(self.device) for parts in (rows, chains))
        return next(places), next(places)

    # ---- results ----

    @torch.no_grad()
    def results(self) -> dict[str, float]:
        """Return the loss, and at each draft step the share of places where drafter and target agree on the
        likeliest token (whether or not the steps before did)."""
        loss = count = 0.0
        agreed = [0.0] * self.depth
        for batch in self.grouped(self.held_out):
            steps = self.rows(batch, self.depth)
            loss += float(soft_cross_entropy(steps[0].wanted, steps[0].given))
            count += len(steps[0].wanted)
            for j, rows in enumerate(steps):
                agreed[j] += float((rows.wanted.argmax(-1) == rows.given.argmax(-1)).sum())
        return {"loss": loss / count} | {f"agreement_{j + 1}": a / count for j, a in enumerate(agreed)}

    @torch.no_grad()
    def calibration(self) -> tuple[tuple[float, float], ...]:
        """Fit inverse temperature and odds of each draft step so that the confidence is the likeliest to be
        right on the held-out documents; a step counts where the ones before agreed."""
        logits: list[list[Tensor]] = [[] for _ in range(self.depth)]
        hits: list[list[Tensor]] = [[] for _ in range(self.depth)]
        for number in self.held_out:
            reached = None
            for j, rows in enumerate(self.rows([number], self.depth)):
                hit = rows.wanted.argmax(-1) == rows.given.argmax(-1)
                reached = torch.ones_like(hit) if reached is None else reached[: len(hit)]
                logits[j].append(rows.given[reached])
                hits[j].append(hit[reached])
                reached = reached & hit
        return tuple(fit_confidence(x, torch.cat(h)) for x, h in zip(logits, hits, strict=True))

    def trained(self, source_sha256: str) -> TrainedDrafter:
        """Return what the model has become, with the recipe, the steps taken and the results on the held-out
        documents. Its weights must be read through MXFP4 by now."""
        meta = {"recipe": asdict(self.recipe), "steps": self.step, "held_out": self.results()}
        return TrainedDrafter(
            feature_layers=tuple(self.recipe.feature_layers),
            planes=self.model.planes(),
            norms=self.model.norm_arrays(),
            draft_ids=self.ids.cpu().numpy().astype(np.uint32),
            calibration=self.calibration(),
            source_sha256=source_sha256,
            meta=meta,
        )

    def linears(self) -> list[MXLinear]:
        return list(self.model.linears().values()) if self.quantized else []

    @torch.no_grad()
    def clamp_latents(self) -> None:
        if self.quantized:
            for linear in self.model.linears().values():
                linear.weight.clamp_(-self.recipe.latent_clip, self.recipe.latent_clip)

    def optimizers(self) -> list[tuple[torch.optim.Optimizer, list[Tensor]]]:
        """Return what steps, and on what; gradients are clipped apart."""
        return [(self.optimizer, list(self.model.parameters()))]

    # ---- checkpoint ----

    def state(self) -> dict[str, Any]:
        return {
            "quantized": self.quantized,
            "model": self.model.state_dict(),
            "ids": self.ids,
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if not torch.equal(state["ids"], self.ids):
            raise ValueError("it has another draft vocabulary")
        if state["quantized"]:
            self._quantize()
        self.model.load_weights(state["model"], state["quantized"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _quantize(self) -> None:
        self.model.start_quantized()
        self.quantized = True
        self.optimizer = self._optimizer()  # the old one knows the weights by other units

    def _optimizer(self) -> torch.optim.Optimizer:
        recipe = self.recipe
        matrices = [linear.weight for linear in self.model.linears().values()]
        decay = 0.0 if self.quantized else recipe.weight_decay
        peak = recipe.quantized_lr if self.quantized else recipe.lr
        return adamw(
            recipe,
            {"params": matrices, "peak": peak, "weight_decay": decay},
            {"params": list(self.model.norms().values()), "peak": recipe.norm_lr},
        )

    # ---- text ----

    def compute_features(
        self, corpora: Sequence[Corpus], progress: Callable[[int, int], None] | None
    ) -> list[Features]:
        """Compute the target's streams for each corpus; the first process computes what is wanted and not on
        file."""
        if self.rank > 0:
            distributed.barrier()
        found = []
        used = np.array(sorted([*self.training, *self.held_out]))
        total = sum(len(self.documents[number].tokens) for number in used)
        done = first = 0

        def tell(tokens: int) -> None:
            nonlocal done
            done += tokens
            if progress is not None:
                progress(done, total)

        for name, corpus in zip(self.recipe.texts, corpora, strict=True):
            documents = [corpus.documents[number].tokens for number in sorted(corpus.documents)]
            cache = self.directory / f"{Path(name).stem}.{self.recipe.target}.npy"
            features = Features(self.bundle, self.recipe.target, self.recipe.feature_layers, documents, cache)
            features.compute(tell, (used - first).tolist())
            found.append(features)
            first += len(documents)
        if self.rank == 0 and self.processes > 1:
            distributed.barrier()
        return found

    def read(self, number: int) -> tuple[Tensor, Tensor]:
        """Return residual streams [T, layers, hidden] and tokens [T] of a document."""
        tokens = torch.from_numpy(self.documents[number].tokens.astype(np.int64))
        for features in self.features:
            if number < len(features.documents):
                return features.of(number).to(self.device), tokens.to(self.device)
            number -= len(features.documents)
        raise IndexError(number)

    def padded(self, batch: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return residual streams [B, T, layers, hidden] and tokens [B, T] of documents, zeros after their
        ends."""
        read = [self.read(number) for number in batch]
        streams = torch.nn.utils.rnn.pad_sequence([r for r, _ in read], batch_first=True)
        return streams, torch.nn.utils.rnn.pad_sequence([t for _, t in read], batch_first=True)

    def _answer(self, number: int) -> NDArray[np.uint16]:
        document = self.documents[number]
        return document.tokens[document.answer_start :]

    def grouped(self, numbers: Sequence[int]) -> list[list[int]]:
        lengths = [len(self.documents[number].tokens) for number in numbers]
        groups = batches(lengths, np.zeros(len(numbers), np.bool_), self.recipe.batch)
        return [[numbers[i] for i in group] for group in groups]

    def _batch(self, step: int) -> list[int]:
        epoch, place = divmod(step, len(self.groups))
        return self.groups[epoch_order(np.arange(len(self.groups)), epoch, self.recipe.seed)[place]]


def extra_rows(tokens: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """List the tokens of documents [B, T] that are not among ``ids``, ascending [E], and where in each
    document each of them occurs first [B, E] (T: not at all)."""
    extra = tokens.unique()
    extra = extra[~torch.isin(extra, ids)]
    length = tokens.shape[1]
    place = torch.arange(length, device=tokens.device).expand_as(tokens)
    index = torch.searchsorted(extra, tokens.contiguous()).clamp_(max=max(len(extra) - 1, 0))
    first = torch.full((len(tokens), len(extra)), length, device=tokens.device)
    if len(extra):
        place = place.where(extra[index] == tokens, length)
        first.scatter_reduce_(1, index, place, "amin")
    return extra, first


def soft_cross_entropy(wanted: Tensor, given: Tensor) -> Tensor:
    """Sum over rows the cross entropy of softmax(given) under softmax(wanted), in nat; −inf in both is left
    out."""
    log = torch.log_softmax(given, -1)
    probability = torch.softmax(wanted, -1)
    return -(probability * log.masked_fill(probability == 0, 0)).sum()


def confidence(logits: Tensor, inverse_temperature: float, odds: float) -> Tensor:
    """Return the probability [n] that the likeliest of ``logits`` [n, rows] is right (docs/arithmetic.md)."""
    above = torch.exp(inverse_temperature * (logits - logits.amax(-1, keepdim=True))).sum(-1) - 1
    return 1 / (1 + odds * above)


def fit_confidence(logits: Sequence[Tensor], hit: Tensor) -> tuple[float, float]:
    """Fit inverse temperature and odds that make ``confidence`` the likeliest, given whether it was right
    [n]; logits of the n rows in parts, for they differ in their number of head rows."""
    best = (float("inf"), 1.0, 1.0)
    for inverse_temperature in np.geomspace(0.25, 2, 25).tolist():
        # ln s with s = Σ exp(i·(l − max l)) − 1, so that ln(odds of the confidence) = −ln s − ln r.
        spread = torch.cat([1 / confidence(part, inverse_temperature, 1.0) - 1 for part in logits])
        spread = spread.clamp_(min=1e-9).log().double()
        low, high = -10.0, 10.0
        for _ in range(40):  # the mean confidence falls with r: where it meets the share of hits
            middle = (low + high) / 2
            if torch.sigmoid(-spread - middle).mean() > hit.double().mean():
                low = middle
            else:
                high = middle
        loss = F.binary_cross_entropy_with_logits(-spread - middle, hit.double())
        best = min(best, (float(loss), inverse_temperature, float(np.exp(middle))))
    return best[1:]
