#!/usr/bin/env python3
"""Train a small Llama-layout language model on one plain-text file.

Reads a text file and writes, in the Hugging Face LlamaForCausalLM layout:

    model.safetensors  config.json  generation_config.json
    tokenizer.json     tokenizer_config.json

The run is a function of the arguments (tokenizer, initial weights, windows and
dropout masks are all drawn from --seed).  The floating-point results also
depend on the machine's vector instructions and the package versions, so only
the same machine with the pinned versions repeats the weights bit for bit.

    pip install -r requirements.txt
    python train.py --text shakespeare.txt --out out
"""

import argparse
import json
import math
import os
import time
from functools import partial
from pathlib import Path

# One thread: enough for a model of this size, and it fixes the summation order.
os.environ.setdefault("NPROC", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "torch_dtype": "float16",
    "use_cache": True,
}
MAX_LEN = CONFIG["max_position_embeddings"]


# ---------------------------------------------------------------- tokenizer


def train_tokenizer(text):
    """Byte-level BPE.  All 256 bytes are in the alphabet, so any text encodes."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=CONFIG["vocab_size"],
            special_tokens=[BOS, EOS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, BOS_ID)],
    )
    assert tok.get_vocab_size() == CONFIG["vocab_size"]
    assert (tok.token_to_id(BOS), tok.token_to_id(EOS)) == (BOS_ID, EOS_ID)
    return tok


def encode(tok, text):
    return np.array(tok.encode(text, add_special_tokens=False).ids, np.int32)


# --------------------------------------------------------------------- data


def split_text(text, held_out):
    """Cut off the last `held_out` share of the text, at a blank line."""
    cut = text.index("\n\n", int(len(text) * (1.0 - held_out))) + 2
    return text[:cut], text[cut:]


def speech_starts(tok, ids):
    """Token positions that follow a blank line: the first token of each speech."""
    newline = tok.token_to_id("Ċ")
    blank = (ids[1:-1] == newline) & (ids[:-2] == newline)
    return np.concatenate([[0], np.flatnonzero(blank) + 2])


def draw_windows(rng, ids, starts, batch, length, bos_share):
    """`batch` rows of length + 1 tokens: inputs and, shifted by one, targets.

    A `bos_share` of the rows opens with <s> and then the start of a speech; the
    others are cut anywhere, without <s>.
    """
    starts = starts[starts <= len(ids) - length]
    rows = np.empty((batch, length + 1), np.int32)
    for row in rows:
        if rng.random() < bos_share:
            at = rng.choice(starts)
            row[0] = BOS_ID
            row[1:] = ids[at : at + length]
        else:
            at = rng.integers(len(ids) - length)
            row[:] = ids[at : at + length + 1]
    return rows


def tile_windows(ids, length):
    """The whole of `ids` as rows of <s> plus `length` tokens; -1 pads the last.

    Every token is a target exactly once.
    """
    count = -(-len(ids) // length)
    rows = np.full((count, length + 1), -1, np.int32)
    rows[:, 0] = BOS_ID
    for row, at in zip(rows, range(0, len(ids), length)):
        part = ids[at : at + length]
        row[1 : 1 + len(part)] = part
    return rows


# -------------------------------------------------------------------- model


def shapes():
    c = CONFIG
    h, m, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    out = {"model.embed_tokens.weight": (c["vocab_size"], h)}
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        out[p + "input_layernorm.weight"] = (h,)
        out[p + "self_attn.q_proj.weight"] = (q, h)
        out[p + "self_attn.k_proj.weight"] = (kv, h)
        out[p + "self_attn.v_proj.weight"] = (kv, h)
        out[p + "self_attn.o_proj.weight"] = (h, q)
        out[p + "post_attention_layernorm.weight"] = (h,)
        out[p + "mlp.gate_proj.weight"] = (m, h)
        out[p + "mlp.up_proj.weight"] = (m, h)
        out[p + "mlp.down_proj.weight"] = (h, m)
    out["model.norm.weight"] = (h,)
    return out


def init_params(seed):
    rng = np.random.default_rng([seed, 1])
    depth = math.sqrt(2 * CONFIG["num_hidden_layers"])
    params = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            params[name] = np.ones(shape, np.float32)
            continue
        std = 0.02 if "embed" in name else shape[1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            std /= depth  # keep the residual stream's size independent of depth
        params[name] = (std * rng.standard_normal(shape)).astype(np.float32)
    return params


def rms_norm(x, weight):
    scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + CONFIG["rms_norm_eps"])
    return x * scale * weight


def rope(length):
    d = CONFIG["head_dim"]
    inv = CONFIG["rope_theta"] ** (-np.arange(0, d, 2) / d)
    angle = np.outer(np.arange(length), inv)
    angle = np.concatenate([angle, angle], -1)
    return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def forward(params, ids, key=None, rate=0.0):
    """ids [batch, time] -> logits [batch, time, vocab].

    With a key, dropout of `rate` on the embedding and on each residual branch.
    """
    c = CONFIG
    heads, groups, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    batch, time_ = ids.shape
    layers = c["num_hidden_layers"]
    keys = None if key is None else iter(jax.random.split(key, 1 + 2 * layers))
    threshold = round(256 * rate)

    def drop(x):
        if keys is None or threshold == 0:
            return x
        keep = jax.random.bits(next(keys), x.shape, jnp.uint8) >= threshold
        return jnp.where(keep, x * (256 / (256 - threshold)), 0)

    cos, sin = rope(time_)
    causal = jnp.asarray(np.tril(np.ones((time_, time_), bool)))
    x = drop(params["model.embed_tokens.weight"][ids])
    for n in range(layers):
        p = f"model.layers.{n}."

        def linear(v, name):
            return v @ params[p + name + ".weight"].T

        def split(v, count):
            return v.reshape(batch, time_, count, d).transpose(0, 2, 1, 3)

        y = rms_norm(x, params[p + "input_layernorm.weight"])
        q = rotate(split(linear(y, "self_attn.q_proj"), heads), cos, sin)
        k = rotate(split(linear(y, "self_attn.k_proj"), groups), cos, sin)
        v = split(linear(y, "self_attn.v_proj"), groups)
        # Query heads that share a key-value head are stacked along time.
        q = q.reshape(batch, groups, heads // groups * time_, d)
        score = jnp.einsum("bgqd,bgkd->bgqk", q * d**-0.5, k)
        score = score.reshape(batch, heads, time_, time_)
        score = jax.nn.softmax(jnp.where(causal, score, -1e30), -1)
        score = score.reshape(batch, groups, heads // groups * time_, time_)
        y = jnp.einsum("bgqk,bgkd->bgqd", score, v).reshape(batch, heads, time_, d)
        y = y.transpose(0, 2, 1, 3).reshape(batch, time_, heads * d)
        x = x + drop(linear(y, "self_attn.o_proj"))

        y = rms_norm(x, params[p + "post_attention_layernorm.weight"])
        y = jax.nn.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj")
        x = x + drop(linear(y, "mlp.down_proj"))
    return rms_norm(x, params["model.norm.weight"]) @ params["model.embed_tokens.weight"].T


def token_losses(params, rows, key=None, rate=0.0):
    """Cross-entropy in nats of each target of `rows` [batch, time + 1]."""
    logits = forward(params, jnp.maximum(rows[:, :-1], 0), key, rate)
    target = jnp.maximum(rows[:, 1:], 0)[..., None]
    picked = jnp.take_along_axis(logits, target, -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - picked


# ----------------------------------------------------------------- training


def learning_rate(step, args):
    """Linear warm-up, then a cosine down to `lr_floor` of the peak."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (args.lr_floor + (1 - args.lr_floor) * 0.5 * (1 + math.cos(math.pi * done)))


@partial(jax.jit, static_argnames=("rate", "decay", "clip"), donate_argnums=(0, 1, 2))
def train_step(params, mean, square, rows, seed, step, lr, *, rate, decay, clip):
    """One AdamW step on the mean loss of `rows`; weight decay on matrices only."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    loss, grads = jax.value_and_grad(
        lambda p: jnp.mean(token_losses(p, rows, key, rate))
    )(params)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    scale = jnp.minimum(1.0, clip / (norm + 1e-6))
    b1, b2 = 0.9, 0.95
    c1, c2 = 1 - b1 ** (step + 1.0), 1 - b2 ** (step + 1.0)
    new = {}, {}, {}
    for name, g in grads.items():
        g = g * scale
        m = b1 * mean[name] + (1 - b1) * g
        s = b2 * square[name] + (1 - b2) * g * g
        update = (m / c1) / (jnp.sqrt(s / c2) + 1e-8)
        if g.ndim == 2:
            update = update + decay * params[name]
        new[0][name], new[1][name], new[2][name] = params[name] - lr * update, m, s
    return *new, loss, norm


eval_losses = jax.jit(token_losses)


def evaluate(params, ids, length):
    """Total nats over all of `ids`, and each token's loss at its window position."""
    rows = tile_windows(ids, length)
    losses = np.concatenate([np.asarray(eval_losses(params, r[None])) for r in rows])
    valid = rows[:, 1:] >= 0
    return losses[valid].sum(dtype=np.float64), losses, valid


def save_checkpoint(path, step, *trees):
    flat = {f"{i}/{k}": np.asarray(v) for i, tree in enumerate(trees) for k, v in tree.items()}
    with open(path.with_suffix(".tmp"), "wb") as f:
        np.savez(f, step=step, **flat)
    os.replace(path.with_suffix(".tmp"), path)


def load_checkpoint(path):
    data = np.load(path)
    trees = [{k: data[f"{i}/{k}"] for k in shapes()} for i in range(3)]
    return int(data["step"]), *trees


def write_model(out, tok, params):
    """Write the weights as f16 with the configuration; return them as f32 again."""
    half = {k: np.asarray(v, np.float32).astype(np.float16) for k, v in params.items()}
    assert all(np.isfinite(v).all() for v in half.values())
    save_file(half, out / "model.safetensors", metadata={"format": "pt"})
    tok.save(str(out / "tokenizer.json"))
    for name, value in {
        "config.json": CONFIG,
        "generation_config.json": {
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "do_sample": False,
            "_from_model_config": True,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_LEN,
        },
    }.items():
        (out / name).write_text(json.dumps(value, indent=2) + "\n")
    return {k: v.astype(np.float32) for k, v in half.items()}


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--text", type=Path, required=True, help="plain UTF-8 text")
    ap.add_argument("--out", type=Path, required=True, help="folder for the model")
    ap.add_argument("--work", type=Path, help="folder for the checkpoint and the log (default: OUT/work)")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--steps", type=int, default=3200, help="all steps, both phases")
    ap.add_argument("--long-steps", type=int, default=500, help="how many of them, at the end, use full-length windows")
    ap.add_argument("--length", type=int, default=256, help="window length before the long phase")
    ap.add_argument("--batch-tokens", type=int, default=2048, help="tokens per step")
    ap.add_argument("--bos-share", type=float, default=0.75, help="share of windows that open with <s> at a speech")
    ap.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    ap.add_argument("--lr-floor", type=float, default=0.05, help="final learning rate over peak")
    ap.add_argument("--warmup", type=int, default=100)
    ap.add_argument("--weight-decay", type=float, default=0.1)
    ap.add_argument("--clip", type=float, default=1.0, help="gradient norm limit")
    ap.add_argument("--dropout", type=float, default=0.1)
    ap.add_argument("--held-out", type=float, default=0.05, help="share of the text, at its end, for validation")
    ap.add_argument("--eval-every", type=int, default=200)
    ap.add_argument("--resume", action="store_true", help="continue from the checkpoint in WORK")
    args = ap.parse_args()

    work = args.work or args.out / "work"
    for folder in (args.out, work):
        folder.mkdir(parents=True, exist_ok=True)
    text = args.text.read_bytes().decode("utf-8")
    train_text, val_text = split_text(text, args.held_out)
    tok = train_tokenizer(train_text)
    train, val = encode(tok, train_text), encode(tok, val_text)
    for part, ids in (train_text, train), (val_text, val):
        assert tok.decode(ids.tolist()) == part
    starts = speech_starts(tok, train)
    print(
        f"train {len(train)} tokens ({len(train_text.encode()) / len(train):.3f} bytes each, "
        f"{len(starts)} speeches), validation {len(val)} tokens, "
        f"{sum(math.prod(s) for s in shapes().values())} parameters",
        flush=True,
    )

    step = 0
    params = init_params(args.seed)
    mean = {k: np.zeros_like(v) for k, v in params.items()}
    square = {k: np.zeros_like(v) for k, v in params.items()}
    checkpoint = work / "checkpoint.npz"
    if args.resume:
        step, params, mean, square = load_checkpoint(checkpoint)
    params, mean, square = jax.device_put((params, mean, square))

    log = open(work / "log.jsonl", "a" if args.resume else "w")
    began = mark = time.time()
    recent = []
    while step < args.steps:
        length = args.length if step < args.steps - args.long_steps else MAX_LEN
        # The windows of a step depend on the seed and the step alone, so a
        # resumed run draws the same ones.
        rng = np.random.default_rng([args.seed, 2, step])
        rows = draw_windows(rng, train, starts, args.batch_tokens // length, length, args.bos_share)
        params, mean, square, loss, norm = train_step(
            params, mean, square, rows, args.seed, step, learning_rate(step, args),
            rate=args.dropout, decay=args.weight_decay, clip=args.clip,
        )
        recent.append((float(loss), float(norm)))
        step += 1
        if step % args.eval_every == 0 or step == args.steps or step == 20:
            now = time.time()
            speed = len(recent) * args.batch_tokens / (now - mark)
            entry = {"step": step, "length": length, "seconds": round(now - began, 1), "tokens_per_s": round(speed)}
            entry["train_dropout"] = round(float(np.mean([r[0] for r in recent])), 4)
            entry["grad_norm"] = round(float(np.mean([r[1] for r in recent])), 3)
            entry["val"] = round(evaluate(params, val, args.length - 1)[0] / len(val), 4)
            save_checkpoint(checkpoint, step, params, mean, square)
            print(json.dumps(entry), flush=True)
            log.write(json.dumps(entry) + "\n")
            log.flush()
            recent, mark = [], time.time()

    # All final numbers are those of the f16 weights as written.
    params = jax.device_put(write_model(args.out, tok, params))
    summary = {"steps": step, "seconds": round(time.time() - began, 1)}
    for name, ids, part in ("train", train, train_text), ("validation", val, val_text):
        for size in args.length, MAX_LEN:
            total, losses, valid = evaluate(params, ids, size - 1)
            summary[f"{name}_{size}"] = {
                "nats_per_token": round(total / len(ids), 4),
                "bits_per_byte": round(total / math.log(2) / len(part.encode()), 4),
            }
        # By position in the long window: it shows whether far context works.
        edges = [0, 64, 128, 256, 512, 768, MAX_LEN - 1]
        summary[f"{name}_by_position"] = {
            f"{a}-{b}": round(float(losses[:, a:b][valid[:, a:b]].mean()), 4) for a, b in zip(edges, edges[1:])
        }
    (work / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
