// What test_team.py runs: a team of threads, over and over, in a process of its own that an alarm ends where it hangs.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../../csrc/pool.h"

using forerun::Team;

constexpr int NUM_THREADS = 3, NUM_TILES = 5, NUM_STAGES = 3;

// Passes of all threads and of the caller alone in turn: how many tiles were done.
static long take_turns(int num_passes) {
    Team team(NUM_THREADS);
    std::atomic<long> num_done{0};
    for (int pass = 0; pass < num_passes; ++pass)
        team.run(pass % 2 == 1, [&](int thread) {
            for (int stage = 0; stage < NUM_STAGES; ++stage) team.tiles(thread, NUM_TILES, [&](int) { ++num_done; });
        });
    return num_done;
}

// Passes in which one thread comes to a stage only when all tiles of all stages are done: how many tiles were done, each
// behind those of the stages before it.
static long without_a_late_thread(int num_passes) {
    Team team(NUM_THREADS);
    std::atomic<long> sum{0};
    for (int pass = 0; pass < num_passes; ++pass) {
        std::atomic<int> num_done{0};
        team.run(false, [&](int thread) {
            for (int stage = 0; stage < NUM_STAGES; ++stage) {
                while (thread == 1 + pass % 2 && stage == pass % NUM_STAGES && num_done < NUM_STAGES * NUM_TILES)
                    std::this_thread::yield();
                team.tiles(thread, NUM_TILES, [&](int) { sum += num_done++ >= stage * NUM_TILES; });
            }
        });
    }
    return sum;
}

// One pass in which a thread (or every one: 3) throws before a stage; what run throws. Up to then threads wait for each
// other, because otherwise the pass may be over before all have come.
static std::string thrown(Team& team, int who, int when) {
    std::atomic<int> num_there{0};
    try {
        team.run(false, [&](int thread) {
            for (int stage = 0; stage <= NUM_STAGES; ++stage) {
                if (stage <= when)
                    for (++num_there; num_there < (stage + 1) * NUM_THREADS;) std::this_thread::yield();
                if (stage == when && (thread == who || who == 3)) throw std::runtime_error("no " + std::to_string(when));
                if (stage < NUM_STAGES) team.tiles(thread, NUM_TILES, [](int) {});
            }
        });
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "nothing";
}

static bool survives(Team& team, int who, int when) {
    std::atomic<int> num_done{0};
    if (thrown(team, who, when) != "no " + std::to_string(when)) return false;
    team.run(false, [&](int thread) { team.tiles(thread, NUM_TILES, [&](int) { ++num_done; }); });
    return num_done == NUM_TILES;
}

// Every thread at every stage, and inside of a tile, many times over.
static bool fail(int num_rounds) {
    Team team(NUM_THREADS);
    for (int round = 0; round < num_rounds; ++round)
        for (int who = 0; who <= 3; ++who)
            for (int when = 0; when <= NUM_STAGES; ++when)
                if (!survives(team, who, when)) return false;
    for (int round = 0; round < num_rounds; ++round)
        try {
            team.run(false, [&](int thread) {
                team.tiles(thread, NUM_TILES, [&](int i) { if (i == 2) throw std::runtime_error("a tile"); });
                std::puts("behind a stage that failed");
            });
            return false;
        } catch (const std::runtime_error&) {
        }
    return survives(team, 0, 0);
}

int main(int, char** arguments) {
    alarm(60);
    if (std::strcmp(arguments[1], "turns") == 0) std::printf("%ld\n", take_turns(4000));
    if (std::strcmp(arguments[1], "late") == 0) std::printf("%ld\n", without_a_late_thread(2000));
    if (std::strcmp(arguments[1], "fail") == 0) std::puts(fail(25) ? "survived" : "failed");
}
