// How the tokens of a run are cut into stretches.
#include "recurrence.h"

#include <algorithm>
#include <map>

namespace forerun {

void StateRun::arrange() {
    const size_t num = static_cast<size_t>(num_tokens());
    std::vector<int> positions(num);
    std::vector<size_t> stretch_of(num);
    std::map<int, size_t> behind_token;  // the stretch that begins behind a token
    std::vector<Stretch> found{{-1, -1, -1, 0, 0, 0, 0}};
    const auto begin_behind = [&](int token) {
        const auto [place, is_new] = behind_token.emplace(token, found.size());
        if (is_new) found.push_back({static_cast<int>(stretch_of[static_cast<size_t>(token)]), token, -1, 0, 0, 0, 0});
        return place->second;
    };
    depths.assign(num, 0), slots.assign(num, 0), paths.assign(num * STATE_TOKENS, 0), order.assign(num, 0);
    for (size_t t = 0; t < num; ++t) {
        const int parent = parents[t];
        positions[t] = parent < 0 ? start : positions[static_cast<size_t>(parent)] + 1;
        const bool begins = parent >= 0 && positions[t] % STATE_TOKENS == 0;
        stretch_of[t] = parent < 0 ? 0 : begins ? begin_behind(parent) : stretch_of[static_cast<size_t>(parent)];
        if (parent >= 0 && !begins) depths[t] = depths[static_cast<size_t>(parent)] + 1;
        ++found[stretch_of[t]].count;
    }
    for (const StateSave& own : saves) found[begin_behind(own.num_tokens - 1)].save = own.state;

    // Each stretch comes behind the one that it continues, and the last of several takes over its slots and level.
    std::vector<std::vector<size_t>> next(found.size());
    for (size_t s = 1; s < found.size(); ++s) next[static_cast<size_t>(found[s].from)].push_back(s);
    std::vector<int> number(found.size(), -1);
    std::vector<size_t> waiting{0};
    stretches.clear();
    num_slots = num_levels = most_tokens = 0;
    for (int first = 0; !waiting.empty();) {
        const size_t s = waiting.back();
        waiting.pop_back();
        Stretch& own = found[s];
        number[s] = static_cast<int>(stretches.size());
        own.from = own.from < 0 ? -1 : number[static_cast<size_t>(own.from)];
        own.first = first, first += own.count;
        stretches.push_back(own);
        num_slots = std::max(num_slots, own.slot + own.count), num_levels = std::max(num_levels, own.level + 1);
        most_tokens = std::max(most_tokens, own.count);
        for (size_t i = next[s].size(); i-- > 0;) {
            const bool is_last = i + 1 == next[s].size();
            Stretch& later = found[next[s][i]];
            later.slot = is_last ? own.slot : own.slot + own.count;
            later.level = is_last ? own.level : own.level + 1;
            waiting.push_back(next[s][i]);
        }
    }
    std::vector<int> at(stretches.size());
    for (size_t t = 0; t < num; ++t) {
        const size_t s = static_cast<size_t>(number[stretch_of[t]]);
        const int place = at[s]++;
        order[static_cast<size_t>(stretches[s].first + place)] = static_cast<int>(t);
        slots[t] = stretches[s].slot + place;
        int* const path = paths.data() + t * STATE_TOKENS;
        if (depths[t] > 0) std::copy_n(paths.data() + static_cast<size_t>(parents[t]) * STATE_TOKENS, depths[t], path);
        path[depths[t]] = slots[t];
    }
}

StateRun StateRun::part(int from, int count, int row) const {
    StateRun own{};
    own.first_row = row, own.num_rows = count, own.first = first, own.start = start;
    int done = 0;  // tokens in the state
    for (const StateSave& save : saves)
        if (from > 0 && save.num_tokens > done) own.first = save.state, done = save.num_tokens;
    own.start += done;
    own.behind = behind;
    own.behind.insert(own.behind.end(), rows.begin(), rows.begin() + from);
    own.behind.erase(own.behind.begin(), own.behind.begin() + done);
    own.rows.assign(rows.begin() + from, rows.begin() + from + count);
    for (int i = 0; i < own.num_tokens(); ++i) own.parents.push_back(i - 1);
    if (from == 0) own.saves = saves;
    own.arrange();
    return own;
}

size_t delta_scratch(const StateHeads& h, int num_heads, int num_slots, int num_levels, int most_tokens) {
    const auto padded = [](int n) { return (static_cast<size_t>(n) + 15) / 16 * 16; };
    const size_t keys = padded(h.key_dim), values = padded(h.value_dim), heads = static_cast<size_t>(num_heads);
    const size_t slots = static_cast<size_t>(num_slots), most = static_cast<size_t>(most_tokens);
    const size_t by_slot = slots * (keys + heads * (values + STATE_TOKENS + 2));
    const size_t states = static_cast<size_t>(num_levels) * heads * (static_cast<size_t>(h.key_dim) * values + 2);
    return by_slot + states + most * (keys + 2 * STATE_TOKENS + 2 * values + 2) + STATE_TOKENS * keys + 17 * 16;
}

}  // namespace forerun
