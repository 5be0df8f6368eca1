"""Liger's divergences and chunked losses, by Strata's operators: against their formulas in PyTorch."""

import pytest
import torch
from torch.nn import functional as F

from strata_kernels.compat.liger import chunked_pairs, divergences
from strata_kernels.compat.liger.cross_entropies import LigerCrossEntropyLoss

N, T, H, V = 4, 5, 8, 11


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, HEAD, BIAS, REFERENCE = rand(N, T, H), rand(V, H, seed=1), rand(V, seed=2), rand(N, T, H, seed=3)
TARGET = torch.randint(V, (N, T), generator=torch.Generator().manual_seed(4))
TARGET[:, :2] = -100
TARGET[1, 2] = -100
DESIRABLE = torch.tensor([True, False, False, True])


def tokens_of(x: torch.Tensor, head: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """[N, T]: log-probabilities of the targets, 0 where there is none."""
    log_probs = F.linear(x, head, bias).log_softmax(-1).gather(-1, TARGET.clamp(min=0)[..., None])[..., 0]
    return log_probs * (TARGET != -100)


def answers_of(x: torch.Tensor, head: torch.Tensor, bias: torch.Tensor, average: bool = False) -> torch.Tensor:
    sums = tokens_of(x, head, bias).sum(-1)
    return sums / (TARGET != -100).sum(-1) if average else sums


def nll(x, head, bias):
    return -tokens_of(x, head, bias)[: N // 2].sum() / (TARGET[: N // 2] != -100).sum()


def dpo(x, head, bias):
    chosen, rejected = (answers_of(x, head, bias) - answers_of(REFERENCE, HEAD, BIAS)).chunk(2)
    return -F.logsigmoid(0.3 * (chosen - rejected)).mean()


def apo_down_with_nll(x, head, bias):
    chosen, rejected = answers_of(x, head, bias, average=True).chunk(2)
    pair = torch.sigmoid(0.3 * chosen) + 1 - torch.sigmoid(0.3 * (chosen - rejected))
    return pair.mean() + 0.5 * nll(x, head, bias)


def cpo(x, head, bias):
    chosen, rejected = answers_of(x, head, bias).chunk(2)
    margin = 0.3 * (chosen - rejected)
    return nll(x, head, bias) - (0.9 * F.logsigmoid(margin) + 0.1 * F.logsigmoid(-margin)).mean()


def simpo(x, head, bias):
    chosen, rejected = answers_of(x, head, bias, average=True).chunk(2)
    return -F.logsigmoid(2.0 * (chosen - rejected) - 0.7).mean()


def orpo(x, head, bias):
    chosen, rejected = answers_of(x, head, bias, average=True).chunk(2)
    odds = chosen - rejected - torch.log((1 - chosen.exp()) / (1 - rejected.exp()))
    return nll(x, head, bias) - 0.3 * F.logsigmoid(odds).mean()


def kto(x, head, bias):
    ratio = answers_of(x, head, bias) - answers_of(REFERENCE, HEAD, BIAS) - 0.2
    return (1 - torch.sigmoid(0.3 * torch.where(DESIRABLE, ratio, -ratio))).mean()


PAIRS = {
    "dpo": (dpo, lambda: chunked_pairs.LigerFusedLinearDPOLoss(beta=0.3), (REFERENCE, HEAD, BIAS)),
    "apo_down": (
        apo_down_with_nll,
        lambda: chunked_pairs.LigerFusedLinearDPOLoss(
            -100, 0.3, 0.5, True, use_ref_model=False, average_log_prob=True, loss_type="apo_down"
        ),
        (),
    ),
    "cpo": (cpo, lambda: chunked_pairs.LigerFusedLinearCPOLoss(beta=0.3, label_smoothing=0.1), ()),
    "simpo": (
        simpo,
        lambda: chunked_pairs.LigerFusedLinearSimPOLoss(beta=2.0, gamma=0.7, compute_nll_loss=False),
        (),
    ),
    "orpo": (orpo, lambda: chunked_pairs.LigerFusedLinearORPOLoss(beta=0.3), ()),
}


def gradients(function, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    loss = function(*leaves)
    # As under gradient accumulation, not one.
    (0.5 * loss).backward()
    return (loss.detach(), *(t.grad for t in leaves))


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name) -> None:
    reference, module, rest = PAIRS[name]
    loss = module()
    got = gradients(lambda x, h, b: loss(h, x, TARGET, b, *rest)[0], X, HEAD, BIAS)
    torch.testing.assert_close(got, gradients(reference, X, HEAD, BIAS), atol=1e-5, rtol=1e-4)


def test_the_figures_beside_the_loss() -> None:
    _, figures = chunked_pairs.LigerFusedLinearORPOLoss(beta=0.3)(HEAD, X, TARGET, BIAS)
    chosen, rejected = answers_of(X, HEAD, BIAS, average=True).chunk(2)
    logits = F.linear(X, HEAD, BIAS)
    expected = (chosen, rejected, logits[:2].mean(), logits[2:].mean(), nll(X, HEAD, BIAS), 0.3 * chosen)
    torch.testing.assert_close(figures[:6], expected)
    assert len(figures) == 9 and not any(figure.requires_grad for figure in figures)


def test_single_answers() -> None:
    loss = chunked_pairs.LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=True)
    rest = (REFERENCE, HEAD, BIAS, torch.tensor(0.2))
    got = gradients(lambda x, h, b: loss(x, h, TARGET, b, DESIRABLE, *rest)[0], X, HEAD, BIAS)
    torch.testing.assert_close(got, gradients(kto, X, HEAD, BIAS), atol=1e-5, rtol=1e-4)
    _, figures = loss(X, HEAD, TARGET, BIAS, DESIRABLE, *rest)
    answers, logits = answers_of(X, HEAD, BIAS), F.linear(X, HEAD, BIAS)
    expected = (answers[DESIRABLE].sum(), answers[~DESIRABLE].sum(), logits[DESIRABLE].sum(), logits[~DESIRABLE].sum())
    torch.testing.assert_close(figures[:4], expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="preference_labels"):
        loss(X, HEAD, TARGET)


def test_constructors_know_their_options() -> None:
    with pytest.raises(TypeError, match="not bata"):
        chunked_pairs.LigerFusedLinearCPOLoss(bata=0.1)
    with pytest.raises(TypeError, match="takes ignore_index"):
        chunked_pairs.LigerFusedLinearORPOLoss(*range(6))


ROWS, LABELS = N * T, TARGET.flatten()
LOG_P, LOG_Q = rand(ROWS, V).log_softmax(-1), rand(ROWS, V, seed=1).log_softmax(-1)


def jsd(log_p, log_q, labels=None, beta=0.5):
    m = ((1 - beta) * log_p.exp() + beta * log_q.exp()).log()
    loss = beta * log_q.exp() * (log_q - m) + (1 - beta) * log_p.exp() * (log_p - m)
    if beta in (0.0, 1.0):
        loss = log_q.exp() * (log_q - log_p) if beta == 0.0 else log_p.exp() * (log_p - log_q)
    counted = torch.ones(ROWS, dtype=torch.bool) if labels is None else labels != -100
    return loss.sum(-1)[counted].sum() / counted.sum()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("labels", [None, LABELS], ids=["all", "labels"])
def test_jsd(beta, labels) -> None:
    module = divergences.LigerJSD(beta)
    got = gradients(lambda x: module(x, LOG_Q, labels), LOG_P)
    torch.testing.assert_close(got, gradients(lambda x: jsd(x, LOG_Q, labels, beta), LOG_P), atol=1e-6, rtol=1e-4)

    teacher, teacher_head = rand(ROWS, 6), rand(V, 6)
    linear = divergences.LigerFusedLinearJSD(beta, temperature=2.0)
    got = gradients(lambda x, h: linear(x, h, teacher, teacher_head, labels), X.reshape(ROWS, H), HEAD)

    def want(x, head):
        log_p, log_q = (F.linear(*pair).div(2.0).log_softmax(-1) for pair in ((x, head), (teacher, teacher_head)))
        return jsd(log_p, log_q, labels, beta)

    torch.testing.assert_close(got, gradients(want, X.reshape(ROWS, H), HEAD), atol=1e-6, rtol=1e-4)


def test_no_row_that_counts() -> None:
    assert divergences.LigerJSD()(LOG_P, LOG_Q, torch.full((ROWS,), -100)) == 0


# PyTorch warns that its mean will be another.
@pytest.mark.filterwarnings("ignore:reduction. 'mean':UserWarning")
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
@pytest.mark.parametrize("log_target", [True, False])
def test_kl_div(reduction, log_target) -> None:
    teacher = LOG_Q if log_target else LOG_Q.exp()
    module = divergences.LigerKLDIVLoss(reduction=reduction, log_target=log_target)
    weights = rand(ROWS, V, seed=5) if reduction == "none" else 1.0
    got = gradients(lambda x: (module(x, teacher) * weights).sum(), LOG_P)

    def want(x):
        return (F.kl_div(x, teacher, reduction=reduction, log_target=log_target) * weights).sum()

    torch.testing.assert_close(got, gradients(want, LOG_P), atol=1e-6, rtol=1e-4)


def test_a_teacher_that_asks_for_a_gradient_gets_none() -> None:
    student, teacher = (rand(3, V, seed=i).log_softmax(-1).requires_grad_() for i in (1, 2))
    divergences.LigerJSD()(student, teacher).backward()
    divergences.LigerKLDIVLoss(reduction="batchmean", log_target=True)(student, teacher).backward()
    x, head, teacher_head = (rand(*shape).requires_grad_() for shape in ((3, H), (V, H), (V, H)))
    divergences.LigerFusedLinearJSD()(x, head, rand(3, H, seed=3).requires_grad_(), teacher_head).backward()
    assert student.grad is not None and head.grad is not None
    assert teacher.grad is None and teacher_head.grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "sigmoyd"}, "Unsupported loss_type: sigmoyd; known are sigmoid"),
        ({"loss_type": "exo_pair"}, "label_smoothing must be > 0 for loss_type='exo_pair'"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, r"must lie in \[0.0, 0.5\) for loss_type='robust'"),
        ({"loss_type": "robust", "label_smoothing": -0.1}, r"must lie in \[0.0, 0.5\) for loss_type='robust'"),
    ],
    ids=["unknown", "exo_pair", "robust, too large", "robust, negative"],
)
def test_dpo_refuses_wrong_options_when_it_is_made(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        chunked_pairs.LigerFusedLinearDPOLoss(**options)


@pytest.mark.parametrize("scale", [1e-4, 1e-5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_z_loss_is_as_exact_as_the_loss(scale, reduction) -> None:
    logits, target = torch.randn(300, 1000), torch.randint(0, 1000, (300,))
    loss = LigerCrossEntropyLoss(lse_square_scale=scale, reduction=reduction, return_z_loss=True)
    squares = scale * logits.double().logsumexp(-1).square()
    expected = getattr(squares, reduction)().item()
    assert loss(logits, target).z_loss.item() == pytest.approx(expected, rel=1e-6)
