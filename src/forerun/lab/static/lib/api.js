// Requests to the server that this page comes from.
const BASE = new URL("../api/", import.meta.url);
const KEY = "api-key";

// The answer to GET, or to POST where there is a body. Asks for the API key where the server wants one.
export async function request(path, body, { signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const response = await fetch(new URL(path, BASE), {
      method: body === undefined ? "GET" : "POST",
      headers: {
        ...(body === undefined ? {} : { "content-type": "application/json" }),
        ...(key ? { authorization: `Bearer ${bytesOf(key)}` } : {}),
      },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
    if (response.status === 401 && (await askForKey(key))) continue;
    if (!response.ok) throw new Error(await messageOf(response));
    return response;
  }
}

// A header holds one byte in each character: here those of the key in UTF-8, as other clients send them.
function bytesOf(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

export async function fetchJson(path, body, options) {
  return (await request(path, body, options)).json();
}

// theory({ function: "speedup", arguments: { alpha: [0.7, 0.8], gamma: 5, c: 0.2 } }, ...) -> [values, ...]
export async function theory(...calls) {
  return (await fetchJson("theory", { calls })).results;
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

let asking = null;

// One dialog for all requests that wait. Whether there is a key now that differs from the one that was sent.
async function askForKey(sent) {
  if (sessionStorage.getItem(KEY) !== sent) return true;
  asking ??= new Promise((resolve) => {
    const key = prompt("This server asks for its API key:");
    if (key) sessionStorage.setItem(KEY, key);
    resolve(Boolean(key));
  }).finally(() => { asking = null; });
  return asking;
}
