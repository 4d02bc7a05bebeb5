/* Included before every file of QuickJS, which takes for granted what wasm32-wasi does not have. */
#include <stdlib.h>

/* Wasm only rounds to nearest.  QuickJS names these modes when it prints numbers, and does without them. */
#define FE_DOWNWARD 0x400
#define FE_UPWARD 0x800
