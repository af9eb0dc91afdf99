/* Identify: how much a token matters to one consumer, from three cheap signals (docs/dynamic-origin.md). */
#ifndef MXD_IDENTIFY_H
#define MXD_IDENTIFY_H

/* What the monitor knows of a token; each in 0..1. What they mean differs between consumers. */
typedef struct mxd_signals {
    float confidence; /* doubt of whoever chose or proposes it: the runner-up's probability over the winner's */
    float attention;  /* share of attention */
    float history;    /* how it went in this text so far */
} mxd_signals;

/* A consumer's own blend. */
typedef struct mxd_weights {
    float alpha, beta, gamma, bias;
} mxd_weights;

/* alpha * confidence + beta * attention + gamma * history + bias: log-odds that the token matters. */
static inline float mxd_score(const mxd_weights *w, mxd_signals s) {
    float score = w->alpha * s.confidence;
    score += w->beta * s.attention;
    score += w->gamma * s.history;
    return score + w->bias;
}

#endif
