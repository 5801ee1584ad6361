/* sampler.h: chooses the next token from logits. Chain: penalties, top-k, top-p, min-p, temperature, draw (the
 * order and the meaning of llama.cpp's defaults). The same parameters, seed and logits give the same ids on every machine: the
 * generator is our own and sums run in a fixed order in double.
 * One sampler belongs to one session; not thread-safe. No allocation after sampler_open. */
#ifndef LH_CORE_SAMPLER_H
#define LH_CORE_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SAMPLER_SEED_RANDOM UINT32_MAX

struct sampler_params {
    float temp;              /* <= 0: greedy (after penalties) */
    int top_k;               /* <= 0: off */
    float top_p;             /* in [0,1]; 1: off. The best token always stays */
    float min_p;             /* in [0,1]; 0: off. Keeps p >= min_p * p_max */
    float repeat_penalty;    /* > 0; 1: off. Divides positive logits of seen tokens, multiplies the others */
    int repeat_last_n;       /* how many latest tokens count as seen; 0: none; -1: the whole context */
    float presence_penalty;  /* [-2,2]; subtracted once for a seen token */
    float frequency_penalty; /* [-2,2]; subtracted per occurrence */
    uint32_t seed;           /* SAMPLER_SEED_RANDOM: taken from the system, see sampler_seed */
};

/* temp 0.8, top_k 40, top_p 0.95, min_p 0.05, repeat_penalty 1.0, repeat_last_n 64, presence and frequency 0, random seed. */
struct sampler_params sampler_defaults(void);

/* 0, or ERR_ARG with a sentence that names option, value and limit ("--top-p 1.5: must be between 0 and 1"). */
int sampler_params_check(const struct sampler_params *p);

/* The penalties look back at most n_ctx tokens (repeat_last_n -1). ERR_ARG as sampler_params_check, ERR_NOMEM. */
struct sampler;
int sampler_open(struct sampler **out, const struct sampler_params *p, int n_vocab, int n_ctx);
void sampler_close(struct sampler *s);

/* Tells the sampler that `id` is now part of the text: prompt tokens and every sampled one. Ids outside the vocabulary
 * are ignored. */
void sampler_accept(struct sampler *s, int id);

/* Chooses an id from logits [n_vocab] into *id; does not accept it. Greedy ties go to the lowest id.
 * -inf is allowed (a token that must not come) unless nothing else is left.
 * ERR_NUMERIC: NaN, +inf, or all logits -inf: the sentence names the first bad index. */
int sampler_sample(struct sampler *s, const float *logits, int *id);

/* The seed in use (a random one was resolved at open). */
uint32_t sampler_seed(const struct sampler *s);

/* Forgets accepted tokens and restarts the generator from the seed. */
void sampler_reset(struct sampler *s);

#ifdef __cplusplus
}
#endif
#endif
