"""Runs in the trainers' environment, as a program: the real speculators classes, driven by JSON requests on stdin, one a line.

    python driver.py      answers each with JSON objects, one a line on stdout: begin, step, done; or error

It imports nothing of hsnb, which is not installed there, and hsnb never imports it. Written for speculators 0.9.0: ArrowDataset,
CollateFn, shift_batch, Eagle3DraftModel, build_optimizers. `mode` train: a short training; load: read a folder with its classes and
count what it drops; drafts: the tokens that a saved drafter drafts, to compare other code with.
"""

import json
import os
import queue
import random
import sys
import threading
import time
import traceback
import warnings
from types import SimpleNamespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes longer than a short training
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def say(**what):
    """Write one line for the parent."""
    sys.__stdout__.write(json.dumps(what) + "\n")
    sys.__stdout__.flush()


def requests():
    """Yield what the parent asks for; leave at once when its end of the pipe closes: a killed notebook must leave no training behind."""
    asked, busy = queue.Queue(), threading.Event()

    def read():
        rest = b""
        while part := os.read(0, 1 << 16):  # not through sys.stdin, whose lock would be held at the interpreter's end
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                asked.put(json.loads(line))
        os._exit(3 if busy.is_set() else 0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        busy.clear()
        request = asked.get()
        busy.set()
        yield request


def open_data(request, folder):
    """Return (ArrowDataset of `folder`, the number of samples that it would drop)."""
    import torch
    from speculators.train.data import ArrowDataset

    return ArrowDataset(max_len=request["max_length"], datapath=folder, on_missing="warn", hidden_states_dtype=torch.float32)


def is_sample(item):
    """Say whether the data set gave a sample: a dict, where a dropped one is a marker."""
    return isinstance(item, dict) or hasattr(item, "keys")


def load(request):
    """Read every sample of a folder with the trainer's own data set, shift and collate function."""
    import torch
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    data, dropped, tokens, trained, shapes = open_data(request, request["data"]), 0, 0, 0, set()
    rows = range(len(data)) if request.get("rows") is None else request["rows"]
    for row in rows:
        item = data[row]
        if not is_sample(item):
            dropped += 1
            continue
        columns = item["hidden_states"].shape[-1] // item["verifier_last_hidden_states"].shape[-1]
        width = item["verifier_last_hidden_states"].shape[-1]
        collate = CollateFn(len(item["input_ids"]), width, columns, torch.float32, shift_batch)
        batch = collate([item])
        shapes.add((columns, tuple(batch["verifier_last_hidden_states"].shape[2:])))
        tokens += len(item["input_ids"])
        trained += int(batch["loss_mask"].sum())
    say(event="done", samples=len(rows), dropped=dropped, tokens=tokens, trained=trained, columns=sorted(c for c, _ in shapes))


def build(request):
    """Return a new Eagle3DraftModel in float32, its vocabulary from the data's token_freq.pt."""
    import torch
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
    from transformers import AutoConfig

    target = AutoConfig.from_pretrained(request["target"])
    freq = torch.load(os.path.join(request["data"], "token_freq.pt"), weights_only=True)
    size = min(request["draft_vocab"], len(freq)) if request["trim_vocab"] else request["draft_vocab"]
    d2t, t2d = build_vocab_mappings_from_distribution(freq, size, target.vocab_size)
    target.num_hidden_layers = 1
    return Eagle3DraftModel.from_training_args(
        verifier_config=target,
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=size,
        target_layer_ids=request["boundaries"],
        ttt_steps=request["drafts"],
        verifier_name_or_path=request["target"],
        draft_attn_impl="eager",
        **request["flags"],
    ).float()


def train(request):
    """Train for `steps` steps or `seconds` seconds, whichever ends first, and save the drafter."""
    import torch
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn
    from speculators.train.optimizers import build_optimizers

    torch.set_num_threads(request["threads"])
    torch.manual_seed(request["seed"])
    model, data = build(request), open_data(request, request["data"])
    room, lengths = request["tokens_per_step"], data.data.with_format(None)["seq_len"]
    shuffled, order, dropped = random.Random(request["seed"]), [], 0
    collate = CollateFn(room, model.config.transformer_layer_config.hidden_size, len(request["boundaries"]), torch.float32, shift_batch)

    def batch():
        nonlocal dropped
        picked, used = [], 0
        while True:
            if not order:
                order.extend(range(len(data)))
                shuffled.shuffle(order)
            if picked and used + lengths[order[-1]] - 1 > room:
                break
            row = order.pop()
            item = data[row]
            if not is_sample(item):
                dropped += 1
                if dropped >= len(data):
                    raise ValueError("every sample was dropped")
                continue
            used += lengths[row] - 1
            picked.append(item)
        return {key: value for key, value in collate(picked).items() if key != "error_records"}, used

    how = {"loss_fn": "kl_div", "loss_implementation": "eager", "ttt_steps": request["ttt_steps"], "ttt_step_loss_decay": 1.0}
    kwargs, _ = Eagle3DraftModel.get_trainer_kwargs(**how)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizers = build_optimizers(model, SimpleNamespace(**request["optimizer"]))
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        muon_in_float32()
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    say(event="begin", samples=len(data), parameters=sum(p.numel() for p in parameters), draft_vocab=model.config.draft_vocab_size)
    model.train()
    begin, trained = time.monotonic(), 0
    for step in range(request["steps"]):
        seconds = time.monotonic() - begin
        if request["seconds"] and seconds > request["seconds"]:
            break
        done = max(step / request["steps"], seconds / request["seconds"] if request["seconds"] else 0.0)
        for optimizer, initial in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, initial, strict=True):
                group["lr"] = rate * min(1.0, (step + 1) / request["warmup_steps"]) * max(0.05, 1.0 - done)
        packed, used = batch()
        _, loss, _ = model(**packed, **kwargs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        trained += used
        say(event="step", step=step + 1, loss=loss.item(), tokens=trained, seconds=time.monotonic() - begin, cpu=time.process_time())
    model.save_pretrained(request["out"])
    own = validate(model, request) if request["validate"] else {}
    say(event="done", dropped=dropped, validation=own, out=request["out"])


def muon_in_float32():
    """Let Muon (torch 2.13's, which speculators takes) orthogonalize in float32, for a CPU without instructions for bfloat16.

    There torch multiplies bfloat16 one number at a time: a step of 0.5 s takes 30. The same five iterations, and rounded less.
    """
    import torch
    import torch.optim._muon as muon

    def orthogonal(grad, coefficients, steps, eps):
        """Return what torch's own returns, in float32: [rows, columns] with singular values near 1."""
        a, b, c = coefficients
        tall = grad.size(0) > grad.size(1)
        x = (grad.T if tall else grad).float()
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if tall else x

    muon._zeropower_via_newtonschulz = orthogonal


def validate(model, request):
    """Return the trainer's own metrics on a folder with the columns that it was trained on: full_acc_k of its metrics.py."""
    import torch
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch

    model.eval()
    sums = {}
    how = {"loss_fn": "kl_div", "loss_implementation": "eager", "ttt_steps": request["drafts"], "ttt_step_loss_decay": 1.0}
    _, kwargs = Eagle3DraftModel.get_trainer_kwargs(**how)
    data = open_data(request, request["validate"])
    for row in range(len(data)):  # one sample a call: a packed batch loses the last positions of each
        x = shift_batch(data[row])
        n = len(x["input_ids"])
        with torch.no_grad():
            _, _, metrics = model(
                hidden_states=x["hidden_states"][None].float(),
                input_ids=x["input_ids"][None],
                document_ids=torch.zeros(1, n, dtype=torch.long),
                loss_mask=x["loss_mask"][None],
                position_ids=x["position_ids"][None],
                verifier_last_hidden_states=x["verifier_last_hidden_states"][None].float(),
                **kwargs,
            )
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return {f"full_acc_{k}": sums[f"full_acc_{k}_sum"] / max(1.0, sums[f"full_acc_{k}_total"]) for k in range(request["drafts"])}


def drafts(request):
    """Write what a saved drafter drafts after every root of every sample: {row: int64 [S - 1, drafts]}, the target's token ids."""
    import torch
    from safetensors.torch import save_file
    from speculators.models.attention import create_float_mask
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch

    torch.set_num_threads(request["threads"])
    model = Eagle3DraftModel.from_pretrained(request["drafter"]).float().eval()
    model._attn_impl, model._create_mask_fn = "eager", create_float_mask  # what a GPU would compile otherwise
    model.config.transformer_layer_config._attn_implementation = "eager"
    data, out = open_data(request, request["data"]), {}
    for row in range(len(data)):
        x = shift_batch(data[row])
        n = len(x["input_ids"])
        with torch.no_grad():
            guessed = model(
                hidden_states=x["hidden_states"][None].float(),
                input_ids=x["input_ids"][None],
                document_ids=torch.zeros(1, n, dtype=torch.long),
                position_ids=x["position_ids"][None],
                ttt_steps=request["drafts"],
            )
        out[str(row)] = torch.stack([tokens[0] + model.d2t[tokens[0]] for tokens in guessed], 1).contiguous()
    save_file(out, request["out"])
    say(event="done", samples=len(out), out=request["out"])


def main():
    sys.stdout = sys.stderr  # libraries that print must not get between the lines
    warnings.filterwarnings("ignore")
    for request in requests():
        try:
            from loguru import logger

            logger.remove()
            {"train": train, "load": load, "drafts": drafts}[request["mode"]](request)
        except Exception as error:
            traceback.print_exc()
            say(event="error", error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
