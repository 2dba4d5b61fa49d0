// Asks the API for something: what it answers, or an error that says in its words what is wrong.

export async function ask(method, path, body, headers = {}) {
  const type = body === undefined ? {} : { "Content-Type": "application/json" };
  const answer = await fetch(path, { method, headers: { ...type, ...headers }, body: JSON.stringify(body) });
  const found = answer.status === 204 ? null : await answer.json().catch(() => ({ detail: answer.statusText }));
  if (!answer.ok) throw new Error(found.errors?.map((one) => one.detail).join("; ") || found.detail);
  return found;
}

// A function that asks for one thing at a time below `root`, and shows in an element what the API says against it.
export function oneAtATime(root, done, usual) {
  let asking = false;
  return async (method, path, body, place = usual) => {
    if (asking) return null;
    asking = true;
    place.textContent = "";
    try {
      const found = await ask(method, `${root}${path}`, body);
      done();
      return found;
    } catch (error) {
      place.textContent = `The request failed: ${error.message}`;
      return null;
    } finally {
      asking = false;
    }
  };
}
