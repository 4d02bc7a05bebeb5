/* uppercase: tokens without lower-case letters, in any script. */
#include <wctype.h>

#include "aici.h"

/* The character that begins at *at, or -1 if it is not whole.  Moves *at behind it. */
static int32_t next_character(const uint8_t **at, const uint8_t *end)
{
    uint8_t first = *(*at)++;
    if (first < 0x80)
        return first;
    int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
    if (first < 0xC2 || first > 0xF4 || end - *at < more)
        return -1;
    int32_t character = first & (0x3F >> more);
    for (; more > 0; more--, (*at)++) {
        if ((**at & 0xC0) != 0x80)
            return -1;
        character = character << 6 | (**at & 0x3F);
    }
    return character;
}

/* A part of a character could become a lower-case letter, so such tokens are not allowed. */
static bool is_upper(const uint8_t *at, size_t size)
{
    const uint8_t *end = at + size;
    while (at < end) {
        int32_t character = next_character(&at, end);
        if (character < 0 || iswlower((wint_t)character))
            return false;
    }
    return size > 0;
}

static struct aici_set allowed;

static void prompt(const uint32_t *tokens, size_t n)
{
    (void)tokens, (void)n;
    for (uint32_t token = 0; token < aici_vocabulary_size(); token++) {
        size_t size;
        const uint8_t *bytes = aici_token_bytes(token, &size);
        if (is_upper(bytes, size))
            aici_set_add(&allowed, token);
    }
    aici_set_add(&allowed, aici_host_eos_token());
}

static struct aici_mid mid(const uint32_t *fork_group, size_t n)
{
    (void)fork_group, (void)n;
    return aici_sample(&allowed);
}

AICI_CONTROLLER(.prompt = prompt, .mid = mid)
