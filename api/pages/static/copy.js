// Buttons marked with data-copy put the text of the element they name, or the page's address, on the clipboard.

const SHOWN_MS = 2000;

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = document.createElement("textarea"); // pages that are not served securely have no clipboard
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  if (!done) throw new Error("the browser does not allow copying");
}

document.addEventListener("click", async ({ target }) => {
  const button = target.closest("[data-copy]");
  if (!button || button.dataset.label) return;
  const source = document.getElementById(button.dataset.copy);
  button.dataset.label = button.textContent;
  try {
    await copy(source ? source.textContent : location.href);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copy failed";
  }
  setTimeout(() => {
    button.textContent = button.dataset.label;
    delete button.dataset.label;
  }, SHOWN_MS);
});
