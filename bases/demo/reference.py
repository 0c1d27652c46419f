#!/usr/bin/env python3
"""Write reference.json for a model folder: greedy continuations in plain numpy.

An independent float32 forward pass (it shares no code with the training script)
over the stored weights.  Other implementations are compared with its numbers.

    python reference.py --model out --out out/reference.json
    python reference.py --model out --sample 200 --temperature 0.8 --top-p 0.95
"""

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

PROMPTS = ["First Citizen:\nBefore we proceed", "ROMEO:\nWhat light is this"]


class Model:
    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.weights = {k: v.astype(np.float32) for k, v in stored.items()}
        d = self.config["head_dim"]
        freq = 1.0 / self.config["rope_theta"] ** (np.arange(0, d, 2, dtype=np.float64) / d)
        angle = np.arange(self.config["max_position_embeddings"])[:, None] * freq
        self.cos = np.cos(angle).astype(np.float32)
        self.sin = np.sin(angle).astype(np.float32)
        layers = self.config["num_hidden_layers"]
        self.keys = [[] for _ in range(layers)]
        self.values = [[] for _ in range(layers)]

    def norm(self, x, name):
        mean_square = np.mean(x * x, dtype=np.float32)
        return x / np.sqrt(mean_square + np.float32(self.config["rms_norm_eps"])) * self.weights[name]

    def rotate(self, heads, position):
        """Rotate the pairs (i, i + half) of every head."""
        half = heads.shape[1] // 2
        cos, sin = self.cos[position], self.sin[position]
        low, high = heads[:, :half], heads[:, half:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=1)

    def step(self, token):
        """Append one token: its logits, and the residual stream before each block
        and before the final norm."""
        c, w = self.config, self.weights
        d = c["head_dim"]
        share = c["num_attention_heads"] // c["num_key_value_heads"]
        position = len(self.keys[0])
        x = w["model.embed_tokens.weight"][token]
        stream = [x]
        for n in range(c["num_hidden_layers"]):
            p = f"model.layers.{n}."
            y = self.norm(x, p + "input_layernorm.weight")
            q = (w[p + "self_attn.q_proj.weight"] @ y).reshape(-1, d)
            k = (w[p + "self_attn.k_proj.weight"] @ y).reshape(-1, d)
            v = (w[p + "self_attn.v_proj.weight"] @ y).reshape(-1, d)
            q = self.rotate(q, position)
            self.keys[n].append(self.rotate(k, position))
            self.values[n].append(v)
            keys, values = np.stack(self.keys[n]), np.stack(self.values[n])
            mixed = []
            for head, query in enumerate(q):
                score = keys[:, head // share] @ query / np.float32(np.sqrt(d))
                score = np.exp(score - score.max())
                mixed.append((score / score.sum()) @ values[:, head // share])
            x = x + w[p + "self_attn.o_proj.weight"] @ np.concatenate(mixed)
            y = self.norm(x, p + "post_attention_layernorm.weight")
            gate = w[p + "mlp.gate_proj.weight"] @ y
            up = w[p + "mlp.up_proj.weight"] @ y
            x = x + w[p + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
            stream.append(x)
        logits = w["model.embed_tokens.weight"] @ self.norm(x, "model.norm.weight")
        assert logits.dtype == np.float32
        return logits, stream


def rounded(values):
    return [round(float(v), 6) for v in values]


def greedy_case(folder, tok, prompt, count):
    model = Model(folder)
    ids = tok.encode(prompt).ids
    blocks = model.config["num_hidden_layers"]
    chosen = sorted({0, blocks // 2, blocks})
    residuals = {str(b): [] for b in chosen}
    case = {"prompt": prompt, "prompt_ids": ids}
    continuation, steps = [], []
    pending = list(ids)
    position = 0
    while len(continuation) < count:
        for token in pending:
            logits, stream = model.step(token)
            if position < 8:
                for b in chosen:
                    residuals[str(b)].append(rounded(stream[b][:8]))
            position += 1
        best, second = np.argsort(-logits, kind="stable")[:2]
        margin = float(logits[best] - logits[second])
        steps.append({"argmax": int(best), "margin": round(margin, 6), "logits_first16": rounded(logits[:16])})
        continuation.append(int(best))
        pending = [int(best)]
    case["continuation_ids"] = continuation
    case["continuation_text"] = tok.decode(continuation)
    case["min_margin"] = min(s["margin"] for s in steps)
    case["residuals_first8"] = residuals
    case["steps"] = steps
    return case


def sample(folder, tok, prompt, count, temperature, top_p, seed):
    rng = np.random.default_rng(seed)
    model = Model(folder)
    ids = tok.encode(prompt).ids
    for token in ids:
        logits, _ = model.step(token)
    for _ in range(count):
        if temperature == 0:
            token = int(np.argmax(logits))
        else:
            p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
            p /= p.sum()
            order = np.argsort(-p, kind="stable")
            before = np.cumsum(p[order]) - p[order]
            order = order[before < top_p]
            token = int(rng.choice(order, p=p[order] / p[order].sum()))
        ids.append(token)
        logits, _ = model.step(token)
    return tok.decode(ids)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--model", type=Path, required=True, help="model folder")
    ap.add_argument("--out", type=Path, help="file for the reference")
    ap.add_argument("--prompt", action="append", help="instead of the built-in prompts")
    ap.add_argument("--count", type=int, default=48, help="greedy tokens per prompt")
    ap.add_argument("--sample", type=int, metavar="TOKENS", help="print a sample of each prompt instead")
    ap.add_argument("--temperature", type=float, default=0.0)
    ap.add_argument("--top-p", type=float, default=1.0)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    tok = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    prompts = args.prompt or PROMPTS
    if args.sample:
        for prompt in prompts:
            print(sample(args.model, tok, prompt, args.sample, args.temperature, args.top_p, args.seed))
            print("----")
        return
    cases = [greedy_case(args.model, tok, p, args.count) for p in prompts]
    reference = {
        "what": "greedy continuation of each prompt; per step the argmax, its margin over the runner-up and the "
        "first 16 logits; residuals_first8[b][t]: first 8 values of the residual stream entering block b "
        "(the last b: entering the final norm) at position t of prompt + continuation",
        "made_with": f"reference.py, numpy {np.__version__}, float32 arithmetic on the stored weights",
        "cases": cases,
    }
    text = json.dumps(reference, ensure_ascii=False)
    if args.out:
        args.out.write_text(text + "\n")
    print(f"{len(text)} characters; smallest margin {min(c['min_margin'] for c in cases)}")


if __name__ == "__main__":
    main()
