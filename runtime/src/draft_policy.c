/* SPDX-License-Identifier: Apache-2.0 */
#include "draft_policy.h"

#include <math.h>
#include <string.h>

enum { PATIENCE = 8, MAX_PATIENCE = 128, MODEL_TRIAL = 32, MODEL_PAUSE = 256, MAX_DRAFTED = 32 };

const uint32_t mxd_wide_rows[MXD_WIDE_COSTS] = {MXD_WIDE_ROWS};

/* Weight of the first guess, and of all evidence: older evidence fades, so that a change of text is noticed. */
static const float PRIOR_WEIGHT = 2, MEMORY = 48;

/* Tokens, promised and kept, with which a credit begins. */
static const float CREDIT_WEIGHT = 8;

/* Share of a token's chance that counts next to other sequences: there a row can cost nearly what a token is worth, and
 * choosing what looks best by estimates that err promises too much. */
static const float CAUTION = 0.95f;

/* ---- identify: the chance of a drafted token ---- */

/* The priors of copies, by matched length, were seen in this model's chats. */
float mxd_policy_prior(uint8_t kind) {
    if (kind < MXD_KIND_COPY) return 0.6f;
    if (kind < MXD_KIND_TABLE) {
        int length = kind - MXD_KIND_COPY + 1;
        return length >= 8 ? 0.9f : 0.1f + 0.1f * (float)length;
    }
    if (kind == MXD_KIND_FORCED) return 0.9f;
    if (kind >= MXD_KIND_BASE) return 0.75f;
    if (kind >= MXD_KIND_MODEL && kind < MXD_KIND_SECOND) return ((float)(kind - MXD_KIND_MODEL) + 0.5f) / 16;
    return ((float)(kind % 8) + 0.5f) / 8; /* bins of eight */
}

float mxd_policy_history(const mxd_policy *p, uint8_t kind) {
    return (p->kind[kind].accepted + PRIOR_WEIGHT * mxd_policy_prior(kind)) / (p->kind[kind].tried + PRIOR_WEIGHT);
}

static float log_odds(float probability) {
    const float least = 1e-4f;
    float x = probability < least ? least : probability > 1 - least ? 1 - least : probability;
    return logf(x / (1 - x));
}

static float chance_of(const mxd_policy *p, uint8_t kind, float confidence) {
    mxd_signals signals = {.confidence = log_odds(confidence), .history = log_odds(mxd_policy_history(p, kind))};
    return 1 / (1 + expf(-mxd_score(&p->weights, signals)));
}

uint32_t mxd_propose(const mxd_policy *p, mxd_proposal *out, uint32_t token, int32_t parent, uint8_t kind,
                     float confidence) {
    float chance = p->weights.alpha == 0 ? p->chance[kind] : chance_of(p, kind, confidence);
    float path = chance * (parent < 0 ? 1 : out->node[parent].path);
    out->node[out->count] = (mxd_node){token, parent, confidence, path, kind, 0};
    return out->count++;
}

/* ---- monitor: what is learned ---- */

void mxd_policy_init(mxd_policy *p, const mxd_weights *weights) {
    *p = (mxd_policy){.weights = *weights, .patience = PATIENCE};
    for (int r = 1; r <= MXD_COST_ROWS; r++) p->costs.step[r] = 1 + 0.1 * (r - 1); /* a guess, in steps of one row */
    for (uint8_t kind = 0; kind < MXD_KINDS; kind++) p->chance[kind] = chance_of(p, kind, mxd_policy_prior(kind));
}

void mxd_policy_set_costs(mxd_policy *p, const mxd_costs *costs) {
    p->costs = *costs;
    memcpy(p->measured_step, costs->step, sizeof p->measured_step);
    p->pace = 1;
    p->plain = p->drafted = 0;
    p->measured = true;
}

static void learn_draft(mxd_policy *p, const mxd_observation *o) {
    uint8_t kind = o->kind;
    if (p->kind[kind].tried >= MEMORY) {
        p->kind[kind].tried /= 2;
        p->kind[kind].accepted /= 2;
    }
    p->kind[kind].tried += 1;
    p->kind[kind].accepted += o->accepted;
    p->chance[kind] = chance_of(p, kind, mxd_policy_prior(kind));
    if (o->accepted && o->verified) p->patience = PATIENCE;
}

/* Look again after steps without a draft whether one pays, ever less often. */
static void learn_choice(mxd_policy *p, mxd_choice choice) {
    if (choice == MXD_NOTHING_PROPOSED) return;
    p->idle = choice == MXD_NONE_PAID ? p->idle + 1 : 0;
    if (choice == MXD_TRIED) p->patience = p->patience * 2 < MAX_PATIENCE ? p->patience * 2 : MAX_PATIENCE;
}

static double clamp(double x, double least, double most) {
    return x < least ? least : x > most ? most : x;
}

static const double SHARE = 0.05; /* of a new value in a moving average */

/* Learn from a step of one row how fast the machine is now. Wider steps may turn out dearer compared with that than
 * measured, never cheaper: else a cost that is wrong could keep away the steps that would tell. */
static void learn_cost(mxd_policy *p, size_t rows, double seconds) {
    const double *measured = p->measured_step;
    double *cost = p->costs.step;
    if (rows == 1) {
        double share = 1 / (double)(p->plain + 1);
        p->pace += (share > SHARE ? share : SHARE) * (clamp(seconds / measured[1], 0.5, 2) - p->pace);
        p->plain++;
        p->drafted = 0;
        return;
    }
    p->drafted++;
    cost[rows] += SHARE * (measured[rows] * clamp(seconds / (measured[rows] * p->pace), 1, 2) - cost[rows]);
    for (size_t r = rows + 1; r <= MXD_COST_ROWS && cost[r] < cost[rows]; r++) cost[r] = cost[rows];
}

static void learn_credit(mxd_policy *p, const mxd_observation *o) {
    int together = o->together;
    if (p->drafts[together].promised >= MEMORY) {
        p->drafts[together].promised /= 2;
        p->drafts[together].kept /= 2;
    }
    p->drafts[together].promised += o->promised;
    p->drafts[together].kept += o->kept;
}

/* Judge the trained drafter after some steps by the time that they saved together. */
static void learn_model(mxd_policy *p, const mxd_observation *o) {
    int together = o->together;
    if (!o->asked_model) return;
    double without = together ? (o->seconds - (double)o->drafter_s) / (1 - (double)o->drafter_gain)
                              : o->tokens * p->measured_step[1] * p->pace;
    p->model[together].saved += without - o->seconds;
    if (++p->model[together].steps < MODEL_TRIAL) return;
    if (p->model[together].saved < 0) p->model[together].pause = MODEL_PAUSE;
    p->model[together].steps = 0;
    p->model[together].saved = 0;
}

static void learn_step(mxd_policy *p, const mxd_observation *o) {
    int together = o->together;
    learn_credit(p, o);
    if (p->model[together].pause > 0) p->model[together].pause--;
    if (!p->measured || (!together && o->rows > MXD_COST_ROWS)) return;
    if (!together) learn_cost(p, o->rows, o->seconds - (double)o->drafting_s);
    learn_model(p, o);
}

void mxd_policy_learn(mxd_policy *p, const mxd_observation *o) {
    if (o->type == MXD_OBSERVED_DRAFT) learn_draft(p, o);
    else if (o->type == MXD_OBSERVED_CHOICE) learn_choice(p, (mxd_choice)o->choice);
    else learn_step(p, o);
}

/* ---- schedule: what pays ---- */

float mxd_policy_credit(const mxd_policy *p, bool together) {
    return (p->drafts[together].kept + CREDIT_WEIGHT) / (p->drafts[together].promised + CREDIT_WEIGHT);
}

/* Interpolate between the widths that were measured; after them, extrapolate the last line. */
double mxd_policy_step_cost(const mxd_policy *p, size_t rows) {
    const double *c = p->costs.step;
    if (rows <= MXD_COST_ROWS) return c[rows];
    size_t from = MXD_COST_ROWS / 2, to = MXD_COST_ROWS;
    double before = c[from], after = c[to];
    for (int i = 0; i < MXD_WIDE_COSTS && to < rows && p->costs.wide[i] > 0; i++) {
        from = to;
        to = mxd_wide_rows[i];
        before = after;
        after = p->costs.wide[i];
    }
    return after + (after - before) / (double)(to - from) * ((double)rows - (double)to);
}

/* Return the seconds that one more row costs. */
static double row_cost(const mxd_policy *p, size_t rows) {
    return mxd_policy_step_cost(p, rows + 1) - mxd_policy_step_cost(p, rows);
}

double mxd_policy_deeper_gain(const mxd_policy *p, float path, size_t rows) {
    const float next = 0.6f; /* a guess of the chance of what is not drafted yet */
    double token = mxd_policy_step_cost(p, rows) / (double)rows;
    return (double)(mxd_policy_credit(p, rows > 1) * path * next) * token - row_cost(p, rows) - p->costs.draft_row;
}

double mxd_policy_base_cost(const mxd_policy *p, size_t rows) {
    return p->costs.base * mxd_policy_step_cost(p, rows) / mxd_policy_step_cost(p, 1);
}

double mxd_policy_model_cost(const mxd_policy *p, size_t rows) {
    return p->costs.draft + p->costs.draft_row * (double)(rows - 1);
}

double mxd_policy_draft_cost(const mxd_policy *p) {
    return p->costs.draft - p->costs.draft_row;
}

bool mxd_policy_asks_model(const mxd_policy *p, size_t n) {
    if (p->model[n > 1].pause > 0) return false;
    float likeliest = 0;
    for (int kind = MXD_KIND_MODEL; kind < MXD_KIND_SECOND; kind++)
        if (p->chance[kind] > likeliest) likeliest = p->chance[kind];
    return n <= 1 || (double)likeliest * mxd_policy_step_cost(p, n) > row_cost(p, n) * (double)n;
}

typedef struct candidate {
    float path;
    uint16_t sequence;
    uint8_t node, kind;
} candidate;

/* List the nodes of n proposals, likeliest first, in their order among equals; returns their number. A parent is never
 * less likely than its child, so it comes first. Not by qsort(), which may allocate: glibc's does from 128 nodes on. */
static size_t rank(mxd_proposal *const *proposals, size_t n, candidate *out) {
    size_t count = 0;
    for (size_t s = 0; s < n; s++)
        for (uint32_t i = 0; i < proposals[s]->count; i++) {
            const mxd_node *node = &proposals[s]->node[i];
            size_t at = count++;
            for (; at > 0 && out[at - 1].path < node->path; at--) out[at] = out[at - 1];
            out[at] = (candidate){node->path, (uint16_t)s, (uint8_t)i, node->kind};
        }
    return count;
}

/* Return the length of the prefix of the ranked candidates that yields the most tokens a second, by trying each: costs
 * have steps. Leaves out those of the trained drafter if so asked. */
static size_t best_prefix(const mxd_policy *p, const candidate *ranked, size_t count, size_t rows, bool without_model,
                          double *best_rate) {
    double made = (double)rows, counts = (double)(mxd_policy_credit(p, rows > 1) * (rows > 1 ? CAUTION : 1));
    size_t best = 0;
    *best_rate = made / mxd_policy_step_cost(p, rows);
    for (size_t i = 0; i < count; i++) {
        if (without_model && ranked[i].kind >= MXD_KIND_MODEL && ranked[i].kind < MXD_KIND_BASE) continue;
        made += counts * (double)ranked[i].path;
        double rate = made / mxd_policy_step_cost(p, ++rows);
        if (rate <= *best_rate) continue;
        *best_rate = rate;
        best = i + 1;
    }
    return best;
}

uint32_t mxd_policy_base_length(const mxd_policy *p, mxd_proposal *d, size_t most) {
    if (p->costs.base <= 0) return 0; /* not known */
    candidate ranked[MXD_MAX_DRAFT];
    double best_rate, tokens = 1, path = 1;
    best_prefix(p, ranked, rank(&d, 1, ranked), 1, false, &best_rate);
    uint32_t best = 0;
    for (uint32_t k = 1; k <= most; k++) {
        path *= (double)p->chance[MXD_KIND_BASE + (k <= 7 ? k - 1 : 7)];
        tokens += path;
        double rate = tokens / (k * p->costs.base + mxd_policy_step_cost(p, 1 + k));
        if (rate <= best_rate) continue;
        best_rate = rate;
        best = k;
    }
    return best;
}

/* Keep the marked nodes whose parents are kept. */
static void compact(mxd_proposal *d, uint32_t marked) {
    int32_t place[MXD_MAX_DRAFT] = {0};
    uint32_t kept = 0;
    for (uint32_t i = 0; i < d->count; i++) {
        int32_t parent = d->node[i].parent < 0 ? -1 : place[d->node[i].parent];
        place[i] = -2; /* not kept */
        if (!(marked >> i & 1) || parent == -2) continue;
        place[i] = (int32_t)kept;
        d->node[kept] = d->node[i];
        d->node[kept++].parent = parent;
    }
    d->count = kept;
}

void mxd_policy_choose(const mxd_policy *p, mxd_proposal *const *proposals, size_t n, size_t rows, size_t room,
                       uint32_t least, mxd_observation *o) {
    candidate ranked[MXD_MAX_SEQS * MXD_MAX_DRAFT];
    uint32_t marked[MXD_MAX_SEQS] = {0}, kept[MXD_MAX_SEQS] = {0};
    size_t count = rank(proposals, n, ranked), fitting = count < room ? count : room;
    if (count == 0) return;
    double rate, rate_without;
    size_t best = best_prefix(p, ranked, fitting, rows, false, &rate);
    best_prefix(p, ranked, fitting, rows, true, &rate_without);
    o->drafter_gain = (float)(1 - rate_without / rate);
    o->choice = best > 0 ? MXD_SOME_PAID : p->idle + 1 < p->patience ? MXD_NONE_PAID : MXD_TRIED;
    if (o->choice == MXD_TRIED) best = 1;
    if (n == 1 && rows == 1 && p->drafted >= MAX_DRAFTED) best = 0; /* to learn the pace */
    for (size_t i = 0; i < count && room > 0; i++) {
        size_t s = ranked[i].sequence;
        if (i >= best && kept[s] >= least) continue;
        marked[s] |= 1u << ranked[i].node;
        kept[s]++;
        room--;
    }
    for (size_t s = 0; s < n; s++) compact(proposals[s], marked[s]);
}
