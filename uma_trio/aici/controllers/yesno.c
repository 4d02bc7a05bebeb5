/* yesno: writes controller_arg, if there is one, and below it "yes" or "no". */
#include "aici.h"

static const char *const WORDS[] = {"yes", "no"};
static struct aici_set allowed;
static struct aici_tokens question; /* to be written */
static char answer[4]; /* so far; during the walk, with the bytes of a token behind it */
static size_t size;

/* Whether the answer begins one of the words (whole: is one of them). */
static bool matches(bool whole)
{
    for (size_t i = 0; i < sizeof WORDS / sizeof *WORDS; i++)
        if (!strncmp(WORDS[i], answer, size) && (!whole || !WORDS[i][size]))
            return true;
    return false;
}

static bool push(void *unused, uint8_t byte)
{
    (void)unused;
    answer[size++] = (char)byte;
    if (matches(false))
        return true;
    size--;
    return false;
}

static void pop(void *unused, unsigned n)
{
    (void)unused;
    size -= n;
}

static void prompt(const uint32_t *tokens, size_t n)
{
    (void)tokens, (void)n;
    struct aici_text text = aici_module_arg();
    if (text.size && strcmp(text.data, "null")) {
        if (text.data[text.size - 1] != '\n')
            aici_append_string(&text, "\n");
        question = aici_tokenize(text.data, text.size);
    }
    free(text.data);
}

static struct aici_pre pre(void)
{
    return (struct aici_pre){.forks = 1, .tokens = question.ids, .n = question.n};
}

static struct aici_mid mid(const uint32_t *fork_group, size_t n)
{
    (void)fork_group, (void)n;
    aici_set_clear(&allowed);
    aici_set_add_accepted(&allowed, push, pop, NULL);
    return aici_sample(&allowed);
}

static bool post(const uint32_t *tokens, size_t n, uint32_t backtrack)
{
    (void)backtrack;
    if (question.n) {
        question.n = 0;
        return false;
    }
    struct aici_text text = aici_detokenize(tokens, n);
    for (size_t i = 0; i < text.size && push(NULL, (uint8_t)text.data[i]); i++)
        ;
    free(text.data);
    return matches(true);
}

AICI_CONTROLLER(.prompt = prompt, .pre = pre, .mid = mid, .post = post)
