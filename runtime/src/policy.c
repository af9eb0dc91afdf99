/* How many drafted tokens a step verifies: as many as make the most of its time, by estimates of both. */
#include <stdlib.h>
#include <string.h>

#include "draft.h"
#include "engine.h"

enum { COST_ROWS = 16, PATIENCE = 8, MAX_PATIENCE = 128, MODEL_TRIAL = 32, MODEL_PAUSE = 256 };

/* Weight of the first guess, and of all evidence: older evidence fades, so that a change of text is noticed. */
static const float PRIOR_WEIGHT = 2, MEMORY = 48;

/* First guesses of acceptance. Copies: by matched length, seen in this model's chats. */
static float prior(uint8_t kind) {
    if (kind < MXD_KIND_COPY) return 0.6f;
    if (kind < MXD_KIND_TABLE) {
        int length = kind - MXD_KIND_COPY + 1;
        return length >= 8 ? 0.9f : 0.1f + 0.1f * (float)length;
    }
    if (kind >= MXD_KIND_BASE) return 0.75f;
    if (kind >= MXD_KIND_MODEL && kind < MXD_KIND_SECOND) return ((float)(kind - MXD_KIND_MODEL) + 0.5f) / 16;
    return ((float)(kind % 8) + 0.5f) / 8; /* bins of eight */
}

void mxd_policy_init(mxd_policy *p) {
    *p = (mxd_policy){.patience = PATIENCE};
    for (int r = 1; r <= COST_ROWS; r++) p->costs.step[r] = 1 + 0.1 * (r - 1); /* a guess, in steps of one row */
}

void mxd_policy_set_costs(mxd_policy *p, const mxd_costs *costs) {
    p->costs = *costs;
    memcpy(p->measured_step, costs->step, sizeof p->measured_step);
    p->pace = 1;
    p->measured = 1;
}

static double clamp(double x, double least, double most) {
    return x < least ? least : x > most ? most : x;
}

void mxd_policy_observe(mxd_policy *p, size_t rows, double seconds, size_t tokens, int model) {
    const double share = 0.05; /* of a new value in a moving average */
    if (p->model_pause > 0) p->model_pause--;
    if (!p->measured || rows > COST_ROWS) return;
    /* Steps of one row tell how fast the machine is now; the others may turn out dearer beside them than measured, never
     * cheaper: else a cost that is wrong could keep the steps away that would tell. */
    const double *measured = p->measured_step;
    if (rows == 1) {
        p->pace += share * (clamp(seconds / measured[1], 0.5, 2) - p->pace);
    } else {
        double *cost = p->costs.step;
        cost[rows] += share * (measured[rows] * clamp(seconds / (measured[rows] * p->pace), 1, 2) - cost[rows]);
        for (size_t r = rows + 1; r <= COST_ROWS && cost[r] < cost[rows]; r++) cost[r] = cost[rows];
    }
    if (!model) return;
    p->saved += 2 * share * ((double)tokens * p->measured_step[1] - seconds - p->saved);
    if (++p->model_steps < MODEL_TRIAL || p->saved >= 0) return;
    p->model_steps = 0;
    p->model_pause = MODEL_PAUSE;
    p->saved = 0;
}

int mxd_policy_asks_model(const mxd_policy *p) {
    return p->model_pause == 0;
}

double mxd_policy_step_cost(const mxd_policy *p, size_t rows) {
    const double *c = p->costs.step;
    if (rows <= COST_ROWS) return c[rows];
    return c[COST_ROWS] + (c[COST_ROWS] - c[COST_ROWS / 2]) / (COST_ROWS / 2) * (double)(rows - COST_ROWS);
}

float mxd_policy_chance(const mxd_policy *p, uint8_t kind) {
    return (p->kind[kind].accepted + PRIOR_WEIGHT * prior(kind)) / (p->kind[kind].tried + PRIOR_WEIGHT);
}

void mxd_policy_learn(mxd_policy *p, uint8_t kind, int accepted) {
    if (p->kind[kind].tried >= MEMORY) {
        p->kind[kind].tried /= 2;
        p->kind[kind].accepted /= 2;
    }
    p->kind[kind].tried += 1;
    if (!accepted) return;
    p->kind[kind].accepted += 1;
    p->patience = PATIENCE;
}

int mxd_policy_deepens(const mxd_policy *p, float path, size_t rows) {
    const float next = 0.6f; /* a guess of the chance of what is not drafted yet */
    double cost = p->costs.draft + mxd_policy_step_cost(p, rows + 1) - mxd_policy_step_cost(p, rows);
    return (double)(path * next) * mxd_policy_step_cost(p, rows) > cost;
}

uint32_t mxd_propose(const mxd_policy *p, mxd_proposal *out, uint32_t token, int32_t parent, uint8_t kind) {
    uint32_t i = out->count++;
    out->token[i] = token;
    out->parent[i] = parent;
    out->kind[i] = kind;
    out->path[i] = mxd_policy_chance(p, kind) * (parent < 0 ? 1 : out->path[parent]);
    return i;
}

typedef struct candidate {
    float path;
    uint16_t sequence, node;
} candidate;

/* Likeliest first. A parent is never less likely than its child, and has the lower index among equals. */
static int by_path(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    if (x->path != y->path) return x->path > y->path ? -1 : 1;
    return x->sequence != y->sequence ? x->sequence - y->sequence : x->node - y->node;
}

/* The prefix of the ranked candidates that yields the most tokens a second, by trying each: costs have steps. */
static size_t best_prefix(const mxd_policy *p, const candidate *ranked, size_t count, size_t n, size_t rows) {
    double tokens = (double)n, best_rate = tokens / mxd_policy_step_cost(p, rows);
    size_t best = 0;
    for (size_t i = 0; i < count; i++) {
        tokens += (double)ranked[i].path;
        double rate = tokens / mxd_policy_step_cost(p, rows + i + 1);
        if (rate > best_rate) best_rate = rate, best = i + 1;
    }
    return best;
}

uint32_t mxd_policy_base_length(const mxd_policy *p, const mxd_proposal *d, size_t most) {
    if (p->costs.base <= 0) return 0; /* not known */
    candidate ranked[MXD_MAX_DRAFT];
    double plain = 1;
    for (uint32_t i = 0; i < d->count; i++) ranked[i] = (candidate){d->path[i], 0, (uint16_t)i};
    qsort(ranked, d->count, sizeof *ranked, by_path);
    size_t rows = best_prefix(p, ranked, d->count, 1, 1);
    for (size_t i = 0; i < rows; i++) plain += (double)ranked[i].path;
    double best_rate = plain / mxd_policy_step_cost(p, 1 + rows), tokens = 1, path = 1;
    uint32_t best = 0;
    for (uint32_t k = 1; k <= most; k++) {
        path *= (double)mxd_policy_chance(p, (uint8_t)(MXD_KIND_BASE + (k <= 7 ? k - 1 : 7)));
        tokens += path;
        double rate = tokens / (k * p->costs.base + mxd_policy_step_cost(p, 1 + k));
        if (rate > best_rate) best_rate = rate, best = k;
    }
    return best;
}

/* Keep the marked nodes whose parents are kept. */
static void compact(mxd_proposal *d, uint32_t marked) {
    int32_t place[MXD_MAX_DRAFT];
    uint32_t kept = 0;
    for (uint32_t i = 0; i < d->count; i++) {
        int32_t parent = d->parent[i] < 0 ? -1 : place[d->parent[i]];
        place[i] = -2; /* not kept */
        if (!(marked >> i & 1) || parent == -2) continue;
        place[i] = (int32_t)kept;
        d->token[kept] = d->token[i];
        d->kind[kept] = d->kind[i];
        d->path[kept] = d->path[i];
        d->parent[kept++] = parent;
    }
    d->count = kept;
}

void mxd_policy_choose(mxd_policy *p, mxd_proposal *const *proposals, size_t n, size_t rows, size_t room,
                       uint32_t least) {
    candidate ranked[MXD_MAX_SEQS * MXD_MAX_DRAFT];
    uint32_t marked[MXD_MAX_SEQS] = {0}, kept[MXD_MAX_SEQS] = {0};
    size_t count = 0;
    for (size_t s = 0; s < n; s++)
        for (uint32_t i = 0; i < proposals[s]->count; i++)
            ranked[count++] = (candidate){proposals[s]->path[i], (uint16_t)s, (uint16_t)i};
    if (count == 0) return;
    qsort(ranked, count, sizeof *ranked, by_path);
    size_t best = best_prefix(p, ranked, count < room ? count : room, n, rows);
    if (best > 0) {
        p->idle = 0;
    } else if (++p->idle >= p->patience) { /* look again whether the text has become predictable, ever less often */
        best = 1;
        p->idle = 0;
        p->patience = p->patience * 2 < MAX_PATIENCE ? p->patience * 2 : MAX_PATIENCE;
    }
    for (size_t i = 0; i < count && room > 0; i++) {
        size_t s = ranked[i].sequence;
        if (i >= best && kept[s] >= least) continue;
        marked[s] |= 1u << ranked[i].node;
        kept[s]++;
        room--;
    }
    for (size_t s = 0; s < n; s++) compact(proposals[s], marked[s]);
}
