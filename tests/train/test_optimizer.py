import math

import pytest
import torch

from glm_lora.config import OptimizerConfig
from glm_lora.train.optimizer import AdapterOptimizer, learning_rate
from tests.support import close


def adamw_reference(values, gradients, config):
    """Loshchilov and Hutter 2019, algorithm 2, written out in float64 for a constant rate."""
    x = values.double()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t, g in enumerate((g.double() for g in gradients), start=1):
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g * g
        m_hat, v_hat = m / (1 - config.beta1**t), v / (1 - config.beta2**t)
        x = x - config.lr * (m_hat / (v_hat.sqrt() + config.eps) + config.weight_decay * x)
    return x


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_equal_the_published_algorithm(decay):
    config = OptimizerConfig(lr=0.01, weight_decay=decay)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(7, 5, generator=generator)
    gradients = [torch.randn(7, 5, generator=generator) for _ in range(6)]
    parameter = torch.nn.Parameter(start.clone())
    optimizer = AdapterOptimizer({"a": parameter}, config, total_steps=6)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    expected = adamw_reference(start, gradients, config)
    close(parameter, expected, "fp32 rounding over six steps", atol=1e-6)


def test_moments_restore_the_next_step_bit_for_bit():
    config = OptimizerConfig(lr=0.01)
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(4, 3, generator=generator)
    gradients = [torch.randn(4, 3, generator=generator) for _ in range(5)]

    def run(parameter, optimizer, part):
        for gradient in part:
            parameter.grad = gradient.clone()
            optimizer.step()

    whole = torch.nn.Parameter(start.clone())
    run(whole, AdapterOptimizer({"a": whole}, config, 5), gradients)

    first = torch.nn.Parameter(start.clone())
    before = AdapterOptimizer({"a": first}, config, 5)
    run(first, before, gradients[:3])
    moments = {k: v.clone() for k, v in before.moments().items()}
    second = torch.nn.Parameter(first.detach().clone())
    after = AdapterOptimizer({"a": second}, config, 5)
    after.load_moments(moments, before.applied_steps)
    run(second, after, gradients[3:])
    assert torch.equal(whole, second)


def test_fresh_moments_would_give_another_step():
    config = OptimizerConfig(lr=0.01)
    a, b = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    trained = AdapterOptimizer({"a": a}, config, 2)
    a.grad = torch.tensor([1.0, 2.0, 3.0])
    trained.step()
    fresh = AdapterOptimizer({"a": b}, config, 2)
    b.data.copy_(a.data)
    for parameter, optimizer in ((a, trained), (b, fresh)):
        parameter.grad = torch.tensor([0.1, -5.0, 2.0])
        optimizer.step()
    assert not torch.equal(a, b)


def test_moments_of_other_tensors_are_refused():
    optimizer = AdapterOptimizer({"a": torch.nn.Parameter(torch.ones(2))}, OptimizerConfig(), 1)
    with pytest.raises(ValueError, match="2 missing, 1 unknown"):
        optimizer.load_moments({"b.exp_avg": torch.ones(2)}, 1)


def test_an_optimizer_without_parameters_is_refused():
    with pytest.raises(ValueError, match="nothing would train"):
        AdapterOptimizer({}, OptimizerConfig(), 1)


def test_schedules():
    def rates(**options):
        config = OptimizerConfig(lr=1.0, **options)
        return [learning_rate(config, step, 10) for step in range(10)]

    assert rates() == [1.0] * 10
    warm = rates(lr_warmup_steps=4)
    assert warm[:4] == [0.25, 0.5, 0.75, 1.0] and warm[4:] == [1.0] * 6
    linear = rates(lr_schedule="linear", lr_warmup_steps=2)
    assert linear[2] == 1.0
    close(linear[6], 0.5, "exact halves")
    cosine = rates(lr_schedule="cosine")
    for step, rate in enumerate(cosine):
        close(rate, 0.5 * (1 + math.cos(math.pi * step / 10)), "the formula itself", atol=1e-12)


def test_clip_scale_scales_the_gradient():
    config = OptimizerConfig(lr=0.01)
    a, b = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    a.grad, b.grad = torch.tensor([1.0, -4.0, 2.0]), torch.tensor([0.5, -2.0, 1.0])
    one, two = AdapterOptimizer({"a": a}, config, 1), AdapterOptimizer({"a": b}, config, 1)
    one.step(clip_scale=0.5)
    two.step()
    assert all(torch.equal(one.moments()[k], two.moments()[k]) for k in one.moments())
