"""Logits of tiny-random-gemma3-f32.gguf in double, for tests/test_logits.c.
llama.cpp's own (beside it) go through a binary16 table for GELU and differ from the exact ones by up to 1.1e-3: with the
same table this program comes within 7e-4 of them, and 3e-7 of noise before the table moves that by 5e-4.
usage: gemma3_f64.py TINY_MODELS_FOLDER   (needs numpy and gguf from PyPI; writes *.logits64.f32 and *.long64.f32)"""
import numpy as np, json, sys
from gguf import GGUFReader
D = sys.argv[1].rstrip('/') + '/'
r=GGUFReader(D+'tiny-random-gemma3-f32.gguf')
kv={k:(f.parts[f.data[0]][0] if len(f.data)==1 and f.types[0].name not in('STRING',) else None) for k,f in r.fields.items()}
W={t.name:np.array(t.data,dtype=np.float64).reshape([int(x) for x in reversed(t.shape)]) for t in r.tensors}
H=int(kv['gemma3.attention.head_count']);K=int(kv['gemma3.attention.head_count_kv']);hd=int(kv['gemma3.attention.key_length']);L=int(kv['gemma3.block_count']);d=int(kv['gemma3.embedding_length'])
eps=float(kv['gemma3.attention.layer_norm_rms_epsilon']); win=int(kv['gemma3.attention.sliding_window']); bg=float(kv['gemma3.rope.freq_base'])
def norm(x,w): return w*x/np.sqrt((x*x).mean(-1,keepdims=True)+eps)
def rope(x,base,fac):
    n=x.shape[0]; f=base**(-2*np.arange(hd//2)/hd)/fac
    a=np.arange(n)[:,None]*f; c,s=np.cos(a)[:,None],np.sin(a)[:,None]
    u,v=x[...,:hd//2],x[...,hd//2:]
    return np.concatenate([u*c-v*s,u*s+v*c],-1)
def run(ids):
    x=W['token_embd.weight'][ids]*np.sqrt(d)
    n=len(ids); i=np.arange(n)
    for l in range(L):
        p=f'blk.{l}.'
        loc=l%6<5
        h=norm(x,W[p+'attn_norm.weight'])
        q=(h@W[p+'attn_q.weight'].T).reshape(n,H,hd);k=(h@W[p+'attn_k.weight'].T).reshape(n,K,hd);v=(h@W[p+'attn_v.weight'].T).reshape(n,K,hd)
        q=norm(q,W[p+'attn_q_norm.weight']);k=norm(k,W[p+'attn_k_norm.weight'])
        fac=1 if loc else float(kv.get('gemma3.rope.scaling.factor') or 1)
        q=rope(q,1e4 if loc else bg,fac);k=rope(k,1e4 if loc else bg,fac)
        o=np.zeros((n,H,hd))
        for hh in range(H):
            s=q[:,hh]@k[:,hh//(H//K)].T/np.sqrt(hd)
            m=(i[None]<=i[:,None])
            if loc: m&=(i[:,None]-i[None]<win)
            s=np.where(m,s,-np.inf); s=np.exp(s-s.max(-1,keepdims=True)); s/=s.sum(-1,keepdims=True)
            o[:,hh]=s@v[:,hh//(H//K)]
        a=norm(o.reshape(n,-1)@W[p+'attn_output.weight'].T,W[p+'post_attention_norm.weight'])
        x=x+a
        h=norm(x,W[p+'ffn_norm.weight'])
        g=h@W[p+'ffn_gate.weight'].T;u=h@W[p+'ffn_up.weight'].T
        f=norm((gelu(g)*u)@W[p+'ffn_down.weight'].T,W[p+'post_ffw_norm.weight'])
        x=x+f
    return norm(x,W['output_norm.weight'])@W['token_embd.weight'].T
gelu=lambda x: 0.5*x*(1+np.tanh(0.7978845608028654*(x+0.044715*x**3)))

e = json.load(open(D + 'expected.json'))
pos = json.load(open(D + 'expected-more.json'))['long_positions']
run(e['tokens']).astype(np.float32).tofile(D + 'tiny-random-gemma3.logits64.f32')
run(e['long_tokens'])[pos].astype(np.float32).tofile(D + 'tiny-random-gemma3.long64.f32')
