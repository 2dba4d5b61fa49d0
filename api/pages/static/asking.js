// Asks the API for something: what it answers, or an error that says in its words what is wrong.

export async function ask(method, path, body, headers = {}) {
  const type = body === undefined ? {} : { "Content-Type": "application/json" };
  const answer = await fetch(path, { method, headers: { ...type, ...headers }, body: JSON.stringify(body) });
  const found = answer.status === 204 ? null : await answer.json().catch(() => ({ detail: answer.statusText }));
  if (!answer.ok) throw new Error(found.errors?.map((one) => one.detail).join("; ") || found.detail);
  return found;
}
