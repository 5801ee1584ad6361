/* support_vocab.h: tokenizers for tests: from files below tests/data, or made of a few tokens. */
#ifndef LH_TESTS_SUPPORT_VOCAB_H
#define LH_TESTS_SUPPORT_VOCAB_H

#include "core/tokenizer.h"

/* Opens the vocabulary of a GGUF file below tests/data (".xz" is unpacked) with the pre-tokenizer `pre`, or the file's
 * when NULL. Fails the test when it cannot. Close with tokenizer_close. */
struct tokenizer *test_vocab_open(const char *name, const char *pre);

/* Compares the ids of a text with the expected ones; on a difference says where and fails. */
void test_ids(const struct tokenizer *t, const char *what, const char *text, size_t n, unsigned flags,
              const int32_t *want, size_t n_want);

/* Fails unless decoding the ids of the text gives the text again. */
void test_round_trip(const struct tokenizer *t, const char *what, const char *text, size_t n, unsigned flags);

#endif
