#!/usr/bin/env python3
"""First-order model of batch-1 decode when weights + KV exceed VRAM.

Three places for every weight byte and every KV byte:
  g  resident in VRAM                     (read at HBM speed)
  c  in host DRAM, used in place by CPU   (read at DRAM speed, CPU flop roof)
  s  in host DRAM, streamed over PCIe     (one DMA per token, then read at HBM speed)

One token (or one n-token verify step) takes
  T = max(Gw, Cw) + max(Ga, Ca) + overheads          (layers are serial)
    Gw/Ga GPU time for weights/attention, Cw/Ca CPU time for its share; split
    attention always runs beside the GPU's share, weights only if every layer's FFN is
    row-split (else Gw + Cw: whole layers on the CPU, as llama.cpp -ngl does)
and must satisfy
  X <= Bp * T                                        link: X = streamed bytes
  C + max(0, X - Bp*(T - tc)) <= Bd * tc             DRAM: CPU and DMA share it
with C = CPU-read bytes, tc = Cw + Ca.  Streaming may run ahead across layers and
across tokens (old KV and weights are known); the CPU may not (it needs this
layer's q).  Everything is an assumption block below: replace by measured values.

Stdlib only.  split_model.py > split_model.csv made the file of predictions that tests/test_plan_table.c reads: tokens/s
with everything in VRAM of unlimited size; with what does not fit on the CPU; with it streamed; with the best split; and
with the best split when the CPU's part of FFNs does not run beside attention weights (BESIDE_ALL).
"""
GB = 1e9
K = 1024

# ---------------------------------------------------------------- hardware
# vram: usable bytes total; hbm: peak GB/s; link: H2D GB/s with pinned memory;
# dram: practical GB/s seen by all readers together; cpu_frac: part of it one good
# CPU kernel reaches alone; f_att: CPU GFLOP/s in f16 attention (n=1);
# f_w: CPU int8 GOP/s in Q4_K dot products; gemm/att: prefill TFLOP/s on the GPU.
HW = {
    "V100-16G+DDR4x2": dict(vram=16.94, res=1.3, hbm=900, link=12.0, dram=40,
                            f_att=350, f_w=600, gemm=60, att=40, base=1.5),
    "V100-16G+DDR4x6": dict(vram=16.94, res=1.3, hbm=900, link=12.0, dram=100,
                            f_att=1000, f_w=1800, gemm=60, att=40, base=1.5),
    "3090+DDR5x2": dict(vram=25.77, res=1.3, hbm=936, link=25.0, dram=65,
                        f_att=900, f_w=1500, gemm=55, att=50, base=1.0),
    "4090+DDR5x2": dict(vram=25.76, res=1.3, hbm=1008, link=25.0, dram=65,
                        f_att=900, f_w=1500, gemm=130, att=120, base=1.0),
    "5090+DDR5x2": dict(vram=34.19, res=1.5, hbm=1792, link=52.0, dram=75,
                        f_att=1200, f_w=2000, gemm=170, att=150, base=1.0),
    "5090+DDR5x8": dict(vram=34.19, res=1.5, hbm=1792, link=52.0, dram=220,
                        f_att=2400, f_w=4000, gemm=170, att=150, base=1.0),
}
ETA_W, ETA_A = 0.65, 0.70      # share of peak HBM reached by Q4_K GEMV / flash-decode
CPU_FRAC = 0.90                # share of practical DRAM bandwidth one CPU kernel reaches
SYNC = 30e-6                   # one GPU->CPU->GPU hand-over (flags in mapped memory)
BESIDE_ALL = True      # the CPU's part of FFNs runs beside all weights, or (False) beside those of FFNs only: the hidden
                       # state that it works on comes out of the attention part
FFN_SHARE = 0.65               # only FFN matrices are row-split between CPU and GPU
Q8_CPU_GAIN = 1.6              # int8 dot for K halves part of the CPU flops
GEMM_GAIN = 1.5                # register blocking once >= 4 query rows share a KV tile

MODELS = {
    # w: bytes of weights read per token; kv: f16 KV bytes per token; g: q heads per kv head
    "dense27B": dict(w=16.0, layers=40, attn=40, kv=40 * 2 * 4 * 128 * 2, g=10,
                     qdim=40 * 128, lin=53e9, state=0.0),
    "hybrid27B": dict(w=16.0, layers=64, attn=16, kv=16 * 2 * 4 * 256 * 2, g=6,
                      qdim=24 * 256, lin=57e9, state=0.151),
}
KVT = {"f16": 1.0, "q8_0": 34.0 / 64.0}
CTX = [4 * K, 32 * K, 128 * K, 256 * K]
ACCEPT, NVER = 2.5, 5          # tokens emitted per verify step, tokens verified (4 drafted)


def step_time(h, m, kt, n, Wg, Wc, Ws, Kg, Kc, Ks, split_ok=True):
    """Seconds for one step; all sizes in GB."""
    fw = 1.0 + 0.07 * (n - 1)              # GPU small-batch penalty, weights
    fa = 1.0 + 0.05 * (n - 1)              # and attention
    Bg = h["hbm"]
    Gw = (Wg + Ws) / (Bg * ETA_W) * fw + 2 * m["state"] / (Bg * ETA_W) * (1 if n == 1 else 2)
    Gw += (Ws + Ks) / Bg                   # writing the staged bytes into VRAM
    Ga = (Kg + Ks) / (Bg * ETA_A) * fa
    Bd, Bp = h["dram"], h["link"]
    cap = Bd * CPU_FRAC
    fa_cpu = h["f_att"] * (Q8_CPU_GAIN if kt == "q8_0" else 1.0) * (GEMM_GAIN if n >= 4 else 1.0)
    flop_b = m["g"] * n / KVT[kt]          # flop per KV byte: 2*g*n per element
    Ca0 = max(Kc / cap, Kc * flop_b / fa_cpu)
    Cw0 = max(Wc / cap, Wc * (2.0 * n / 0.6) / h["f_w"])
    X, C = Ws + Ks, Wc + Kc
    ov0 = h["base"] * 1e-3 + (m["attn"] * SYNC if Kc > 1e-9 else 0.0)
    if Wc <= 1e-9:
        return solve(Gw, 0.0, Ga, Ca0, ov0, X, C, Bp, Bd, True)
    # weights on the CPU: either whole layers (serial, few hand-overs) or the FFN of every
    # layer row-split like two-way tensor parallelism (parallel, one hand-over per layer)
    ov_serial = ov0 + 2 * SYNC * m["layers"] * Wc / m["w"]
    ov_split = ov0 + SYNC * m["layers"]
    a = solve(Gw, Cw0, Ga, Ca0, ov_serial, X, C, Bp, Bd, False)
    if not split_ok or Wc + Ws > FFN_SHARE * m["w"] + 1e-6:
        return a
    beside = Gw if BESIDE_ALL else max(0.0, FFN_SHARE * m["w"] - Wc) / (Bg * ETA_W) * fw
    return min(a, solve(beside, Cw0, Ga, Ca0, ov_split + Gw - beside, X, C, Bp, Bd, True))


def solve(Gw, Cw0, Ga, Ca0, ov, X, C, Bp, Bd, parallel):
    """Smallest step time: stretch the CPU windows until DRAM can carry CPU and DMA."""
    def T(s):
        w = max(Gw, s * Cw0) if parallel else Gw + s * Cw0
        return w + max(Ga, s * Ca0) + ov

    t0 = Cw0 + Ca0
    if t0 == 0.0:
        return max(T(1.0), X / Bp)

    def ok(s):
        t, tc = max(T(s), X / Bp), s * t0
        return C + max(0.0, X - Bp * (t - tc)) <= Bd * tc + 1e-12

    s = 1.0
    if not ok(1.0):
        lo, hi = 1.0, 8.0
        for _ in range(18):
            mid = (lo + hi) / 2
            if ok(mid):
                hi = mid
            else:
                lo = mid
        s = hi
    return max(T(s), X / Bp, (C + X) / Bd)


def usable(h, m, X=0.0):
    # two staging slots of one attention layer's streamed share, at least 64 MB
    stage = max(0.064, 2.0 * X / m["attn"]) if X else 0.0
    return h["vram"] - h["res"] - m["state"] * 2 - stage


def place(h, m, Kt, X=0.0):
    """Weights first, then KV."""
    v = usable(h, m, X)
    Wg = min(m["w"], v)
    Kg = min(Kt, v - Wg)
    return Wg, Kg


def strategies(h, m, kt, ctx):
    Kt = ctx * m["kv"] * KVT[kt] / GB
    W = m["w"]
    out = {}
    # 0: everything in (imaginary) VRAM
    out["vram"] = 1 / step_time(h, m, kt, 1, W, 0, 0, Kt, 0, 0)
    # 1: all KV on host, attended by the CPU, weights in VRAM as far as they fit
    Wg = min(W, usable(h, m))
    out["1cpu"] = 1 / step_time(h, m, kt, 1, Wg, W - Wg, 0, 0, Kt, 0, False)
    # 1s: only what does not fit is on the host, CPU attends it
    Wg, Kg = place(h, m, Kt)
    out["1s"] = 1 / step_time(h, m, kt, 1, Wg, W - Wg, 0, Kg, Kt - Kg, 0, False)
    # 2: only what does not fit is on the host, all of it streamed each token
    X = max(0.0, W + Kt - usable(h, m))
    Wg, Kg = place(h, m, Kt, X)
    out["2str"] = 1 / step_time(h, m, kt, 1, Wg, 0, W - Wg, Kg, 0, Kt - Kg)
    b1, d1 = best(h, m, kt, Kt, 1)
    out["3opt"] = 1 / b1
    b5, d5 = best(h, m, kt, Kt, NVER)
    out["4spec"] = ACCEPT / b5
    out["d3"], out["d4"], out["kv"] = d1, d5, Kt
    out["spill"] = X
    return out


def best(h, m, kt, Kt, n):
    W = m["w"]
    res = (1e9, None)
    S0 = max(0.0, W + Kt - usable(h, m))
    if S0 == 0.0:
        return step_time(h, m, kt, n, W, 0, 0, Kt, 0, 0), dict(Wc=0, Ws=0, Kc=0, Ks=0)
    steps = [i / 16 for i in range(17)]
    lo0, hi0 = max(0.0, S0 - Kt), min(W, S0)
    ffn = min(1.0, max(0.0, (FFN_SHARE * W * 0.999 - lo0) / max(1e-9, hi0 - lo0)))
    for wfrac in (0.0, 0.25 * ffn, 0.5 * ffn, 0.95 * ffn, 1.0):
        for sk in steps:
            for sw in (0.0, 0.25, 0.5, 0.75, 1.0):
                # spill depends a little on staging; two rounds settle it
                X = 0.0
                for _ in range(2):
                    S = max(0.0, W + Kt - usable(h, m, X))
                    lo, hi = max(0.0, S - Kt), min(W, S)
                    Wsp = lo + wfrac * (hi - lo)
                    Ksp = S - Wsp
                    X = sw * Wsp + sk * Ksp
                Ws, Ks = sw * Wsp, sk * Ksp
                t = step_time(h, m, kt, n, W - Wsp, Wsp - Ws, Ws, Kt - Ksp, Ksp - Ks, Ks)
                if t < res[0]:
                    res = (t, dict(Wc=Wsp - Ws, Ws=Ws, Kc=Ksp - Ks, Ks=Ks))
    return res

FILES = {"V100-16G+DDR4x2": "v100-16g-2ch", "V100-16G+DDR4x6": "v100-16g-6ch", "3090+DDR5x2": "3090-2ch",
         "4090+DDR5x2": "4090-2ch", "5090+DDR5x2": "5090-2ch", "5090+DDR5x8": "5090-8ch"}


def main():
    global BESIDE_ALL
    print("# made by split_model.py: machine (tests/machines), model, KV type, context, GB reserved,"
          " t/s: vram, cpu, streamed, best, beside FFN")
    for hn, h in HW.items():
        for mn, m in MODELS.items():
            for kt in KVT:
                for ctx in CTX:
                    BESIDE_ALL = False
                    ffn = strategies(h, m, kt, ctx)["3opt"]
                    BESIDE_ALL = True
                    o = strategies(h, m, kt, ctx)
                    print("%s,%s,%s,%d,%g,%.4f,%.4f,%.4f,%.4f,%.4f" % (FILES[hn], mn, kt, ctx, h["res"], o["vram"], o["1s"],
                                                                    o["2str"], o["3opt"], ffn))


if __name__ == "__main__":
    main()
