"""SGLang on one GPU against transformers: accuracy, sync time, fifty syncs, refusals, release.

A random four-layer glm5_next at hidden 4096 is served with all 43 sites adapted. The reference is
transformers in fp32 with the adapter added to the weights. ``sglang_h200.sh`` prepares the
environment and runs this; it ends with a table and the JSON of ``--json``.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_site import site_env
from benchmarks.json_output import add_json, print_json, save_json
from glm_lora.arch.projections import trainable_sites
from glm_lora.arch.spec import ModelSpec
from glm_lora.errors import RunError, SyncError
from glm_lora.fingerprint import fingerprint_tensors
from glm_lora.model.hf_hooks import mend_kda
from glm_lora.protocols import BASE, AdapterState, Request, SamplingParams
from glm_lora.rollout.sglang import SglangEngine
from glm_lora.rollout.sglang_adapters import Transport
from glm_lora.rollout.sglang_client import SglangClient
from glm_lora.rollout.sglang_server import ServerOptions, SglangServer
from glm_lora.sync.push import check_base, push_and_verify, record_probe
from glm_lora.targets.selection import Selection, make_selection

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANK, ALPHA = 8, 16.0
LENGTHS = (17, 64, 130, 300)
SPEC = ModelSpec(
    num_hidden_layers=4,
    hidden_size=4096,
    intermediate_size=1024,
    moe_intermediate_size=512,
    vocab_size=2048,
    num_attention_heads=16,
    q_lora_rank=512,
    linear_num_heads=16,
    index_kpool=4,
    n_routed_experts=16,
    pad_token_id=0,
    eos_token_ids=(1,),
)
FLAGS = [
    "--linear-attn-backend",
    "triton",
    "--mm-attention-backend",
    "triton_attn",
    "--sampling-backend",
    "pytorch",
    "--disable-radix-cache",
    "--disable-overlap-schedule",
    "--max-total-tokens",
    "16384",
    "--max-running-requests",
    "16",
    "--context-length",
    "4096",
    "--chunked-prefill-size",
    "2048",
    "--watchdog-timeout",
    "900",
    "--disable-cuda-graph",
]


def write_checkpoint(folder: Path) -> None:
    """Random weights of the size that keeps activations near one, as transformers writes them."""
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    names = {f.name for f in fields(SPEC)} - {"eos_token_ids", "layer_types", "mlp_layer_types"}
    text = {name: getattr(SPEC, name) for name in names}
    text |= {"num_key_value_heads": SPEC.num_attention_heads, "max_position_embeddings": 8192}
    vision = {
        "depth": 1,
        "hidden_size": 256,
        "num_heads": 4,
        "intermediate_size": 256,
        "out_hidden_size": SPEC.hidden_size,
        "projection_intermediate_size": 256,
    }
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=text, vision_config=vision))
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                p.normal_(0, 1.0)
            elif name == "lm_head.weight":
                p.normal_(0, 1.5 * p.shape[-1] ** -0.5)
            elif ".experts." in name or (p.ndim == 2 and _is_projection(name)):
                p.normal_(0, p.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def _is_projection(name: str) -> bool:
    special = ("conv1d", ".indexer.", "_hc.")
    return "language_model" in name and not any(s in name for s in special)


def random_state(selection: Selection, version: int, strength: float = 0.3) -> AdapterState:
    """A random bf16 adapter whose output is about ``strength`` of each projection's."""
    generator = torch.Generator().manual_seed(version)
    tensors: dict[str, torch.Tensor] = {}
    for a in selection.adapters:
        width = a.site.in_features
        tensors[a.a_key] = torch.randn(a.rank, width, generator=generator) / width**0.5
        b = torch.randn(a.site.out_features, a.rank, generator=generator)
        tensors[a.b_key] = b * (strength / (a.scaling * a.rank**0.5))
    tensors = {k: v.to(torch.bfloat16) for k, v in tensors.items()}
    return AdapterState(selection, tensors, version, fingerprint_tensors(tensors))


class Reference:
    """transformers in fp32 on the same GPU; an adapter is added to the weights and taken away."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import Glm5NextForConditionalGeneration

        model = Glm5NextForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        self.model = model.to(DEVICE).eval()
        mend_kda(self.model)
        self.weights = dict(self.model.named_parameters())

    def logprobs(self, sequences, state: AdapterState | None) -> list[np.ndarray]:
        """Log-probability of tokens 1.. of each sequence under ``state`` (None: base)."""
        saved = {}
        with torch.no_grad():
            for a in state.selection.adapters if state else ():
                weight = self.weights[f"{a.site.name}.weight"]
                saved[weight] = weight.clone()
                b, factor = state.tensors[a.b_key].to(DEVICE).float(), state.tensors[a.a_key]
                weight += a.scaling * (b @ factor.to(DEVICE).float())
            answers = []
            for tokens in sequences:
                ids = torch.tensor([list(tokens)], device=DEVICE)
                logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
                chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                answers.append(chosen.cpu().numpy())
            for weight, old in saved.items():
                weight.copy_(old)
        return answers


def prompts() -> list[tuple[int, ...]]:
    """Random prompts, 511 tokens together."""
    generator = torch.Generator().manual_seed(7)
    draw = [torch.randint(3, SPEC.vocab_size, (n,), generator=generator) for n in LENGTHS]
    return [tuple(d.tolist()) for d in draw]


def server_memory() -> int:
    """Bytes of GPU memory in use by others than this process."""
    if DEVICE == "cpu":
        return 1
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def difference(a: list[np.ndarray], b: list[np.ndarray]) -> dict[str, float]:
    """Mean and largest absolute difference, and the number of tokens."""
    gap = np.abs(np.concatenate(a).astype(np.float64) - np.concatenate(b))
    return {"mean": float(gap.mean()), "max": float(gap.max()), "tokens": int(gap.size)}


class Check:
    """All checks on one server; every method adds to ``results``."""

    def __init__(self, args: argparse.Namespace, reference: Reference, selection: Selection):
        self.args, self.reference, self.selection = args, reference, selection
        self.results: dict[str, object] = {}
        self.prompts = prompts()
        self.version = 0
        self.url = ""

    def next_state(self, strength: float = 0.3) -> AdapterState:
        """A new random adapter with the next version."""
        self.version += 1
        return random_state(self.selection, self.version, strength)

    def start(self, work: Path, backend: str, *, saver: bool = False) -> SglangEngine:
        """Start a server and connect; seconds to health are a result."""
        options = ServerOptions(
            checkpoint=self.args.work / "checkpoint",
            selection=self.selection,
            python=sys.executable,
            work_dir=work,
            tensor_parallel=self.args.tp,
            mem_fraction=self.args.mem_fraction,
            lora_backend=backend,
            memory_saver=saver,
            passed=tuple(FLAGS),
            # Prompts shorter than index_topk take the sparse path too.
            env={
                **(site_env(self.args.site, ROOT) if self.args.site else {}),
                "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
            },
        )
        server = SglangServer(options)
        self.url = server.url
        try:
            self.results["healthy_s"] = round(server.wait(self.args.wait), 1)
            engine = SglangEngine([SglangClient(server.url)], servers=[server])
        except BaseException:
            server.stop()
            raise
        self.results["plugin"] = dict(engine.info.plugin)
        return engine

    def accuracy(self, engine: SglangEngine) -> None:
        """Base and adapter against transformers, prompt and sampled tokens; the base unchanged."""
        start = time.perf_counter()
        before = engine.score(self.prompts, BASE)
        self.results["first_score_s"] = round(time.perf_counter() - start, 1)
        state = self.next_state()
        engine.push(state)
        adapted = engine.score(self.prompts, state.ref())
        base_ref = self.reference.logprobs(self.prompts, None)
        adapted_ref = self.reference.logprobs(self.prompts, state)
        self.results["base"] = difference(before, base_ref)
        self.results["adapter"] = difference(adapted, adapted_ref)
        self.results["effect"] = difference(adapted_ref, base_ref)
        requests = [
            Request(p, SamplingParams(16, 1.0, SPEC.eos_token_ids, seed=i), n=2)
            for i, p in enumerate(self.prompts)
        ]
        for name, ref, used in (("decode_base", BASE, None), ("decode", state.ref(), state)):
            samples = engine.generate(requests, ref)
            whole = [s.prompt_ids + s.response_ids for s in samples]
            scored = self.reference.logprobs(whole, used)
            tails = [x[len(s.prompt_ids) - 1 :] for x, s in zip(scored, samples, strict=True)]
            self.results[name] = difference([np.asarray(s.logprobs) for s in samples], tails)
        again = engine.score(self.prompts, BASE)
        self.results["base_bit_equal"] = all(map(np.array_equal, before, again))

    def sync(self, transport: Transport, rounds: int) -> None:
        """Time of push_and_verify by ``transport``: validate, serialise, load, first use."""
        # An engine that started no server unloads its adapters and leaves the server running.
        engine = SglangEngine([SglangClient(self.url)], transport=transport)
        try:
            self._sync(engine, transport, rounds)
        finally:
            engine.close()

    def _sync(self, engine: SglangEngine, transport: Transport, rounds: int) -> None:
        probe = record_probe(engine, self.prompts[2])
        reports = []
        for _ in range(rounds):
            state = self.next_state()
            (expected,) = self.reference.logprobs([probe.tokens], state)
            report = push_and_verify(state, engine, probe, lambda _, e=expected: e, limit=0.1)
            reports.append(report)
        times = [r.seconds * 1e3 for r in reports]
        self.results[f"sync_{transport}"] = {
            "median_ms": round(statistics.median(times), 1),
            "max_ms": round(max(times), 1),
            "push_median_ms": round(statistics.median(r.receipt.seconds for r in reports) * 1e3, 1),
            "body_bytes": reports[-1].receipt.bytes,
            "probe_mean": round(max(r.mean_difference for r in reports), 4),
        }

    def endurance(self, engine: SglangEngine, rounds: int) -> None:
        """Syncs in a row with generation between: memory flat, probes right."""
        probe = record_probe(engine, self.prompts[2])
        request = Request(self.prompts[0], SamplingParams(8, 1.0), n=4)
        memory: list[int] = []
        worst = 0.0
        for i in range(rounds):
            state = self.next_state()
            (expected,) = self.reference.logprobs([probe.tokens], state)
            report = push_and_verify(state, engine, probe, lambda _, e=expected: e, limit=0.1)
            worst = max(worst, report.mean_difference)
            engine.generate([request], state.ref())
            if i >= 2:
                memory.append(server_memory())
        check_base(engine, probe)
        self.results["endurance"] = {
            "syncs": rounds,
            "memory_first_gb": round(memory[0] / 1e9, 3),
            "memory_last_gb": round(memory[-1] / 1e9, 3),
            "growth_percent": round(100 * (memory[-1] / memory[0] - 1), 3),
            "worst_probe_mean": round(worst, 4),
        }

    def refusals(self, engine: SglangEngine) -> None:
        """Spoiled adapters are refused with the reason, and the server goes on."""
        answers = {}
        good = self.next_state()
        name = self.selection.adapters[0].a_key
        for kind, value in (("misshapen", good.tensors[name][:, :-1]), ("other value", None)):
            tensors = dict(good.tensors)
            tensors[name] = good.tensors[name] + 1 if value is None else value.contiguous()
            try:
                engine.push(replace(good, tensors=tensors, version=10_000 + len(answers)))
                answers[kind] = "ACCEPTED"
            except SyncError as error:
                answers[kind] = str(error)[:300]
        self.results["refusals"] = answers
        engine.push(good)
        engine.score([self.prompts[0]], good.ref())

    def release(self, engine: SglangEngine) -> None:
        """Give the memory back and take it again: the base is bit-equal, an adapter still loads."""
        probe = record_probe(engine, self.prompts[2])
        before = server_memory()
        start = time.perf_counter()
        engine.release()
        released = time.perf_counter() - start
        during = server_memory()
        start = time.perf_counter()
        engine.resume()
        resumed = time.perf_counter() - start
        check_base(engine, probe)
        state = self.next_state()
        (expected,) = self.reference.logprobs([probe.tokens], state)
        push_and_verify(state, engine, probe, lambda _: expected)
        self.results["release"] = {
            "before_gb": round(before / 1e9, 2),
            "released_gb": round(during / 1e9, 2),
            "release_s": round(released, 2),
            "resume_s": round(resumed, 2),
            "base_bit_equal": True,
        }


def rows(report: dict) -> list[tuple[str, str, str, bool]]:
    """The figures with their limits: name, value, limit, reached."""
    return [
        (f"{backend}: {name}", str(value), limit, bool(good))
        for backend, results in report["backends"].items()
        for name, value, limit, good in _backend_rows(results)
    ]


def _backend_rows(r: dict) -> Iterator[tuple[str, object, str, bool]]:
    if "error" in r:
        yield "error", str(r["error"])[:90], "none", False
    if "base" in r:
        mean = r["base"]["mean"]
        yield "base mean diff", round(mean, 4), "<= 0.02", mean <= 0.02
    if "adapter" in r:
        mean, tokens, effect = r["adapter"]["mean"], r["adapter"]["tokens"], r["effect"]["mean"]
        limit = min(0.02, 1.5 * r["base"]["mean"])
        yield "adapter mean diff", round(mean, 4), "<= 0.02, <= 1.5 x base", mean <= limit
        yield "tokens", tokens, ">= 500", tokens >= 500
        yield "adapter effect (mean)", round(effect, 3), "> 0.1", effect > 0.1
    if "decode" in r:
        mean = r["decode"]["mean"]
        yield "decode mean diff", round(mean, 4), "<= 0.02", mean <= 0.02
    if "base_bit_equal" in r:
        yield "base bit-equal after", r["base_bit_equal"], "True", r["base_bit_equal"]
    for transport in ("bytes", "folder"):
        if sync := r.get(f"sync_{transport}"):
            median = sync["median_ms"]
            yield f"sync by {transport}, median ms", median, "<= 200", median <= 200
    if e := r.get("endurance"):
        growth = e["growth_percent"]
        yield f"{e['syncs']} syncs, memory growth %", growth, "<= 1", abs(growth) <= 1
    if "refusals" in r:
        accepted = sum(v == "ACCEPTED" for v in r["refusals"].values())
        yield "bad adapters accepted", accepted, "0", not accepted
    if rel := r.get("release"):
        before, during = rel["before_gb"], rel["released_gb"]
        yield f"release {before} -> GB", during, "less", during < before


def attempt(check: Check, engine: SglangEngine, work: Callable[[SglangEngine], None]) -> None:
    """Run one part; an error is a result, and the parts after it still run."""
    start = time.perf_counter()
    try:
        work(engine)
    except (RunError, RuntimeError, ValueError, KeyError) as error:
        check.results.setdefault("error", f"{type(error).__name__}: {error}"[:1500])
        print(f"FAILED: {check.results['error']}", flush=True)
    print(f"  part took {time.perf_counter() - start:.1f} s", flush=True)


def main() -> int:
    """Run every part that fits the budget and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    add_json(parser)
    parser.add_argument("--site", type=Path, help="folder with SGLang's packages")
    parser.add_argument("--logs", type=Path, help="copy the servers' logs here")
    parser.add_argument("--wait", type=float, default=330.0)
    parser.add_argument("--budget", type=float, default=520.0)
    parser.add_argument("--syncs", type=int, default=50)
    parser.add_argument("--backends", default="triton,csgmv,release")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of the server")
    parser.add_argument("--mem-fraction", type=float, default=0.3, help="of a GPU, others included")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    started = time.monotonic()
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / "checkpoint" / "config.json").exists():
        write_checkpoint(args.work / "checkpoint")
    selection = make_selection("bench", SPEC, trainable_sites(SPEC), rank=RANK, alpha=ALPHA)
    print(f"{selection.num_sites} sites, {selection.trainable_parameters:,} parameters")
    reference = Reference(args.work / "checkpoint")
    report: dict = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        "torch": torch.__version__,
        "sites": selection.num_sites,
        "backends": {},
    }
    for name in args.backends.split(","):
        left = args.budget - (time.monotonic() - started)
        if left < 60 and report["backends"]:
            report["backends"][name] = {"error": f"not run: {left:.0f} s left"}
            continue
        args.wait = min(args.wait, max(left - 20, 30))
        report["backends"][name] = one_backend(args, name, reference, selection, started)
        save_json(args.json, report)
    report["seconds"] = round(time.monotonic() - started, 1)
    table = rows(report)
    for row_name, value, limit, good in table:
        print(f"{'ok  ' if good else 'MISS'} {row_name:<46} {value:<14} {limit}", flush=True)
    print_json(args.json, report)
    return 0 if all(good for *_, good in table) else 1


def one_backend(args, name: str, reference: Reference, selection: Selection, started: float):
    """Everything on one server; its results."""
    saver = name == "release"
    check = Check(args, reference, selection)
    work = args.work / f"server-{name}"
    shutil.rmtree(work, ignore_errors=True)
    engine: SglangEngine | None = None
    try:
        engine = check.start(work, "triton" if saver else name, saver=saver)
        print(f"{name}: healthy after {check.results['healthy_s']} s", flush=True)
        engine.require_plugin(SPEC)
        if saver:
            attempt(check, engine, check.release)
        else:
            attempt(check, engine, check.accuracy)
            attempt(check, engine, lambda _: check.sync("bytes", 10))
            attempt(check, engine, lambda _: check.sync("folder", 10))
        if name == "triton":
            attempt(check, engine, check.refusals)
            attempt(check, engine, lambda e: check.endurance(e, args.syncs))
    except RunError as error:
        check.results["error"] = f"{error}"[:3000]
        print(check.results["error"], flush=True)
    finally:
        if engine is not None:
            engine.close()
        if args.logs:
            args.logs.mkdir(parents=True, exist_ok=True)
            for log in work.glob("*.log"):
                shutil.copy(log, args.logs / f"{name}-{log.name}")
    check.results["at_s"] = round(time.monotonic() - started, 1)
    return check.results


if __name__ == "__main__":
    sys.exit(main())
