"""LigerAdamW against AdamW's formula in float64 and against torch's own."""

import copy
import math

import pytest
import torch
from liger_kernel._library import ops
from liger_kernel.optim import LigerAdamW

SHAPES = [(7,), (33, 65), (1,), (0, 4), (2, 3, 2048), (40000,)]
HYPER = dict(lr=3e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)


def parameters(dtype, device, seed=0):
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=g) for shape in SHAPES]
    made.append(torch.randn(9, 6, generator=g).t())  # dense, and not contiguous
    made.append(torch.randn(1001, generator=g)[1:])  # of an address that 16 does not divide
    return [torch.nn.Parameter(t.to(device=device, dtype=dtype)) for t in made]


def set_gradients(all_parameters, seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    for p in all_parameters:
        p.grad = torch.empty_like(p)  # with its strides
        p.grad.copy_(torch.randn(p.shape, generator=g) * scale)


def exact_step(p, g, m, v, t, maximize=False, lr=HYPER["lr"]):
    """In float64."""
    (beta1, beta2), eps, decay = HYPER["betas"], HYPER["eps"], HYPER["weight_decay"]
    g = -g if maximize else g
    p = p * (1 - lr * decay)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    step = lr / (1 - beta1**t) * m / (v.sqrt() / math.sqrt(1 - beta2**t) + eps)
    return p - step, m, v


def error(found, exact):
    return math.sqrt(sum((a.double().cpu() - b.cpu()).square().sum().item() for a, b in zip(found, exact)))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_step(dtype, maximize, device):
    """One step from random moments: at most 1.1 times torch's distance from float64."""
    ours, theirs = parameters(dtype, device), parameters(dtype, device)
    optimizers = LigerAdamW(ours, **HYPER, maximize=maximize), torch.optim.AdamW(theirs, **HYPER, maximize=maximize)
    set_gradients(ours, 1), set_gradients(theirs, 1)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer, own in zip(optimizers, (ours, theirs)):
        g = torch.Generator().manual_seed(2)
        for p in own:
            optimizer.state[p]["exp_avg"].copy_(torch.randn(p.shape, generator=g))
            optimizer.state[p]["exp_avg_sq"].copy_(torch.rand(p.shape, generator=g))
            p.data.copy_(torch.randn(p.shape, generator=g))
            optimizer.state[p]["step"].fill_(6)
    set_gradients(ours, 3), set_gradients(theirs, 3)
    exact = []
    for p in ours:
        state = optimizers[0].state[p]
        exact.append(
            exact_step(*(t.detach().double() for t in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])), 7, maximize)
        )
    for optimizer in optimizers:
        optimizer.step()
    for which, name in enumerate((None, "exp_avg", "exp_avg_sq")):
        expected = [each[which] for each in exact]
        found, own = (
            [(p if name is None else optimizer.state[p][name]).detach() for p in group]
            for optimizer, group in zip(optimizers, (ours, theirs))
        )
        size = math.sqrt(sum(t.square().sum().item() for t in expected))
        assert error(found, expected) <= max(1.1 * error(own, expected), torch.finfo(dtype).eps / 8 * size)
    assert all(optimizers[0].state[p]["step"].item() == 7 for p in ours)


@pytest.mark.parametrize("state_dtype, master_weights", [(torch.float32, False), (None, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float_states(dtype, state_dtype, master_weights, device):
    """20 steps of 16-bit parameters, whose moments, and perhaps a copy, are float."""
    own = parameters(dtype, device)
    optimizer = LigerAdamW(own, **HYPER, state_dtype=state_dtype, master_weights=master_weights)
    exact = [(p.detach().double(), torch.zeros_like(p).double(), torch.zeros_like(p).double()) for p in own]
    for t in range(1, 21):
        set_gradients(own, t)
        exact = [exact_step(e[0], p.grad.double(), e[1], e[2], t) for p, e in zip(own, exact)]
        if not master_weights:  # the parameter is rounded at each step
            exact = [(e[0].to(dtype).double(), *e[1:]) for e in exact]
        optimizer.step()
    for which, name in ((1, "exp_avg"), (2, "exp_avg_sq"), *([(0, "master")] if master_weights else [])):
        found = [optimizer.state[p][name] for p in own]
        assert all(t.dtype == torch.float32 for t in found)
        expected = [e[which] for e in exact]
        size = math.sqrt(sum(t.square().sum().item() for t in expected))
        assert error(found, expected) <= 20 * torch.finfo(torch.float32).eps * size
    for p, (expected, *_) in zip(own, exact):
        # A unit in the last place where the float value lies near the middle of two; two where that happens in two
        # steps, whose rounding a master weight does not carry on.
        units = 1.01 if master_weights else 2.02
        assert ((p.double() - expected).abs() <= units * torch.finfo(dtype).eps * expected.abs() + 1e-7).all()
        if master_weights:
            assert torch.equal(p, optimizer.state[p]["master"].to(dtype))


def test_clipping_is_torch_s(device):
    """And leaves the gradients alone."""
    ours, theirs = parameters(torch.float32, device), parameters(torch.float32, device)
    optimizers = LigerAdamW(ours, **HYPER), torch.optim.AdamW(theirs, **HYPER)
    for t, scale in enumerate((1.0, 1e-4)):  # clipped, and not
        set_gradients(ours, t, scale), set_gradients(theirs, t, scale)
        before = [p.grad.clone() for p in ours]
        norm = optimizers[0].clip_grad_norm_(1.0)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0), rtol=1e-6, atol=0)
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, before))
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_scaled_gradients(device):
    """What a GradScaler tells an optimizer: gradients are divided, and a step with infinite ones is not taken."""
    ours, theirs = parameters(torch.float32, device), parameters(torch.float32, device)
    optimizers = LigerAdamW(ours, **HYPER), torch.optim.AdamW(theirs, **HYPER, fused=True)
    for t in range(2):
        for optimizer, own in zip(optimizers, (ours, theirs)):
            set_gradients(own, t, 1024.0)
            optimizer.grad_scale = torch.tensor(1024.0, device=device)
            optimizer.found_inf = torch.tensor(float(t), device=device)
            optimizer.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert optimizers[0].state[p]["step"] == optimizers[1].state[q]["step"] == 1


def test_a_learning_rate_on_the_device(device):
    ours, theirs = parameters(torch.float32, device), parameters(torch.float32, device)
    rate = torch.tensor(HYPER["lr"], device=device)
    a, b = LigerAdamW(ours, **HYPER | {"lr": rate}, capturable=True), LigerAdamW(theirs, **HYPER)
    for t in range(2):
        set_gradients(ours, t), set_gradients(theirs, t)
        a.step(), b.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs))
    rate.zero_()
    before = [p.detach().clone() for p in ours]
    a.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, before))


@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.float32}, {"master_weights": True}], ids=str)
def test_state_dicts(options, device):
    """Saved and loaded, the next step is the same to the bit; torch's and ours load each other's."""
    own = parameters(torch.bfloat16, device)
    first = LigerAdamW(own, **HYPER, **options)
    set_gradients(own, 1)
    first.step()
    again = copy.deepcopy(own)
    second = LigerAdamW(again, **HYPER, **options)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    theirs = torch.optim.AdamW(copy.deepcopy(own), **HYPER, fused=True)
    theirs.load_state_dict(copy.deepcopy(first.state_dict()))
    third = LigerAdamW(copy.deepcopy(own), **HYPER, **options)
    third.load_state_dict(copy.deepcopy(theirs.state_dict()))
    set_gradients(own, 2), set_gradients(again, 2)
    first.step(), second.step()
    assert all(torch.equal(p, q) for p, q in zip(own, again))
    for p, q in zip(own, again):
        for name, value in first.state[p].items():
            assert second.state[q][name].dtype == value.dtype and torch.equal(second.state[q][name], value), name
    for optimizer in (theirs, third):
        others = optimizer.param_groups[0]["params"]
        set_gradients(others, 2)
        optimizer.step()
        for p, q in zip(own, others):
            eps = torch.finfo(torch.bfloat16).eps
            torch.testing.assert_close(p, q, rtol=2 * eps, atol=2 * eps * HYPER["lr"])


def test_repeats_to_the_bit(device):
    results = []
    for _ in range(2):
        own = parameters(torch.float32, device)
        optimizer = LigerAdamW([{"params": own[:3], "weight_decay": 0.0}, {"params": own[3:]}], **HYPER)
        for t in range(3):
            set_gradients(own, t)
            if t == 1:
                own[2].grad = None  # takes no step
            optimizer.step()
        assert optimizer.state[own[2]]["step"] == 2 and optimizer.state[own[0]]["step"] == 3
        results.append(own)
    assert all(torch.equal(p, q) for p, q in zip(*results))


def test_a_closure_and_many_tensors(device):
    """More tensors than one launch takes."""
    own = [torch.nn.Parameter(torch.full((3,), float(i), device=device)) for i in range(150)]
    optimizer = LigerAdamW(own, lr=0.5, weight_decay=0.0)

    def closure():
        optimizer.zero_grad()
        loss = sum((p - 1).square().sum() for p in own)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == sum(3 * (i - 1) ** 2 for i in range(150))
    for i, p in enumerate(own):
        expected = i - 0.5 * (i > 1) + 0.5 * (i < 1)  # the first step has the length of the learning rate
        torch.testing.assert_close(p, torch.full_like(p, expected), rtol=1e-5, atol=1e-5)


def test_what_is_refused(device):
    p, g, m, v = (torch.zeros(4, 3, device=device) for _ in range(4))
    step = torch.ones((), device=device)

    def run(p=p, g=g, m=m, v=v, masters=(), steps=(step,), beta1=0.9):
        rest = (None, None, None, 1e-3, beta1, 0.99, 0.0, 1e-8, False)
        ops.adamw_([p], [g], [m], [v], list(masters), list(steps), *rest)

    run()
    for error_type, text, wrong in [
        (RuntimeError, "1 parameters and 2 steps", dict(steps=(step, step))),
        (RuntimeError, "gradients must be as its parameter", dict(g=g[:3])),
        (RuntimeError, "means must be as its parameter", dict(m=torch.zeros(3, 4, device=device).t())),
        (TypeError, "squares must be of", dict(v=v.bfloat16())),
        (TypeError, "masters must be of float32", dict(p=p.half(), g=g.half(), masters=(p.half(),))),
        (TypeError, "masters are of parameters in 16 bits", dict(masters=(p.clone(),))),
        (TypeError, "parameters must be float32", dict(p=p.double(), g=g.double(), m=m.double(), v=v.double())),
        (RuntimeError, "parameters must be dense", dict(p=torch.zeros(4, 6, device=device)[:, ::2])),
        (ValueError, "beta1 and beta2", dict(beta1=1.0)),
        (TypeError, "steps must be float32", dict(steps=(step.long(),))),
    ]:
        with pytest.raises(error_type, match=text):
            run(**wrong)
    with pytest.raises(ValueError, match="master_weights"):
        LigerAdamW([torch.nn.Parameter(p)], master_weights=True, state_dtype=torch.bfloat16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_captured():
    own, eager = parameters(torch.bfloat16, "cuda"), parameters(torch.bfloat16, "cuda")
    optimizers = [
        LigerAdamW(
            group, **HYPER | {"lr": torch.tensor(HYPER["lr"], device="cuda")}, capturable=True, master_weights=True
        )
        for group in (own, eager)
    ]
    set_gradients(own, 0), set_gradients(eager, 0)
    for optimizer in optimizers:
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        optimizers[0].clip_grad_norm_(1.0)
        optimizers[0].step()
    for t in range(1, 4):
        g = torch.Generator().manual_seed(t)
        for p, q in zip(own, eager):
            p.grad.copy_(torch.randn(p.shape, generator=g)), q.grad.copy_(p.grad)
        graph.replay()
        optimizers[1].clip_grad_norm_(1.0)
        optimizers[1].step()
    assert all(torch.equal(p, q) for p, q in zip(own, eager))


@pytest.mark.parametrize("state_dtype, master_weights", [(None, False), (torch.float32, False), (None, True)])
def test_mixed_dtypes(state_dtype, master_weights, device):
    """One group of float32, bfloat16 and float16 parameters, as of a model with float norms or adapters: each is
    updated as alone."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    own = [p for dtype in dtypes for p in parameters(dtype, device)]
    apart = [parameters(dtype, device) for dtype in dtypes]
    options = dict(state_dtype=state_dtype, master_weights=master_weights, **HYPER)
    together, alone = LigerAdamW(own, **options), [LigerAdamW(each, **options) for each in apart]
    for t in range(3):
        for number, each in enumerate(apart):
            set_gradients(each, 10 * t + number)
        for p, q in zip(own, (q for each in apart for q in each)):
            p.grad = q.grad.clone()
        for optimizer in (together, *alone):
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(own, (q for each in apart for q in each)))
    assert all(("master" in together.state[p]) == (master_weights and p.dtype != torch.float32) for p in own)


def test_options_of_others_are_refused(device):
    own = parameters(torch.float32, device)
    for name, value in (("amsgrad", True), ("nesterov", True), ("momentum", 0.9), ("differentiable", True)):
        with pytest.raises(ValueError, match=f"LigerAdamW has no {name}"):
            LigerAdamW([{"params": own, name: value}])
    LigerAdamW([{"params": own, "amsgrad": False, "momentum": 0, "name": "decayed", "lr_scale": 2.0}])
    optimizer = LigerAdamW(own)
    set_gradients(own, 0)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.step()
    for theirs, words in (
        (torch.optim.AdamW(own, amsgrad=True), "amsgrad"),
        (torch.optim.SGD(own, momentum=0.9), "dampening|momentum"),
        (torch.optim.Adam(own, weight_decay=0.1), "torch.optim.Adam"),
    ):
        theirs.step()
        state = theirs.state_dict()
        with pytest.raises(ValueError, match=words):
            LigerAdamW(own).load_state_dict(state)
    state = torch.optim.AdamW(own, amsgrad=True)
    state.step()
    state = state.state_dict()
    state["param_groups"][0]["amsgrad"] = False  # its state still says so
    with pytest.raises(ValueError, match="max_exp_avg_sq"):
        LigerAdamW(own).load_state_dict(state)
    theirs = torch.optim.Adam(own)
    theirs.step()
    LigerAdamW(own).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("how", ["zero_grad", "new gradients", "none"])
def test_a_clipping_whose_step_was_skipped(how, device):
    """Its factor scales no other gradients."""
    ours, theirs = parameters(torch.float32, device), parameters(torch.float32, device)
    optimizers = LigerAdamW(ours, **HYPER), torch.optim.AdamW(theirs, **HYPER)
    set_gradients(ours, 0)
    optimizers[0].clip_grad_norm_(1e-3)  # and the step is skipped, as a gradient scaler does
    if how == "zero_grad":
        for p in ours:
            p.grad.zero_()
        optimizers[0].zero_grad(set_to_none=False)
        kept = [p.grad for p in ours]
        set_gradients(theirs, 1)
        for gradient, p in zip(kept, theirs):
            gradient.copy_(p.grad)
    else:
        set_gradients(ours, 1), set_gradients(theirs, 1)
    if how == "none":
        for each in (ours, theirs):
            each[0].grad = None
    for optimizer in optimizers:
        optimizer.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
