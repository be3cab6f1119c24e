// The formulas that move with the hand. Each has the name and the meaning of its twin in forerun.theory, and a test in
// the browser compares the two on a grid.

// sum_x min(p, q): the probability that a draw of q is accepted.
export const acceptance = (p, q) => p.reduce((sum, value, x) => sum + Math.min(value, q[x]), 0);

// max(0, p - q) by id: what is refilled. residual(q, p) is what is rejected.
export const residual = (p, q) => p.map((value, x) => Math.max(0, value - q[x]));

// 1 + alpha + ... + alpha^gamma (equation 1).
export function expectedTokens(alpha, gamma) {
  return alpha === 1 ? gamma + 1 : (1 - alpha ** (gamma + 1)) / (1 - alpha);
}

// Theorem 3.8, with v(gamma) in place of 1.
export function speedup(alpha, gamma, c, verifyRatio = 1) {
  return expectedTokens(alpha, gamma) / (c * gamma + verifyRatio);
}

// The gamma of the largest speed-up; 0 where none pays. verifyRatios: v(gamma) by gamma.
export function optimalGamma(alpha, c, verifyRatios) {
  return bestOf(verifyRatios.map((_, gamma) => expectedTokens(alpha, gamma)), verifyRatios.map((v, gamma) => c * gamma + v));
}

// The same from the tokens and the cost of a round, by gamma; the least where several are equal.
export function bestOf(tokens, costs) {
  let best = 0;
  for (let gamma = 1; gamma < costs.length; gamma += 1) {
    if (tokens[gamma] / costs[gamma] > tokens[best] / costs[best] + 1e-12) best = gamma;
  }
  return best;
}

// The alpha at which `speedup` is 1; null where even alpha = 1 does not reach it.
export function breakEvenAlpha(gamma, c, verifyRatio = 1) {
  if (speedup(1, gamma, c, verifyRatio) < 1) return null;
  let [low, high] = [0, 1];
  for (let i = 0; i < 50; i += 1) {
    const middle = (low + high) / 2;
    if (speedup(middle, gamma, c, verifyRatio) < 1) low = middle;
    else high = middle;
  }
  return high;
}

// The mean L1 distance to p of the shares of a perfect sampler after so many draws, and one standard deviation of it.
export function l1Noise(p, numDraws) {
  const deviations = p.map((value) => Math.sqrt((value * (1 - value)) / numDraws));
  const mean = Math.sqrt(2 / Math.PI) * deviations.reduce((sum, one) => sum + one, 0);
  let variance = 0;
  for (let x = 0; x < p.length; x += 1) {
    for (let y = 0; y < p.length; y += 1) {
      if (deviations[x] === 0 || deviations[y] === 0) continue;
      const rho = x === y ? 1 : -Math.sqrt((p[x] * p[y]) / ((1 - p[x]) * (1 - p[y])));
      const share = Math.sqrt(Math.max(0, 1 - rho * rho)) + rho * Math.asin(Math.max(-1, rho)) - 1;
      variance += deviations[x] * deviations[y] * (2 / Math.PI) * share;
    }
  }
  return { mean, deviation: Math.sqrt(Math.max(0, variance)) };
}

// sum_x |counts / total - p|.
export function l1Distance(counts, p) {
  const total = counts.reduce((sum, one) => sum + one, 0);
  return total ? p.reduce((sum, value, x) => sum + Math.abs(counts[x] / total - value), 0) : null;
}

// sum_x (count - expected)^2 / expected; infinite where a word of probability 0 was counted.
export function chiSquare(counts, p) {
  const total = counts.reduce((sum, one) => sum + one, 0);
  return p.reduce((sum, value, x) => sum + (value > 0 ? (counts[x] - total * value) ** 2 / (total * value) : counts[x] > 0 ? Infinity : 0), 0);
}
