// The form that has a language model continue a text.

import { ask } from "./asking.js";

const form = document.getElementById("generate");
const problem = document.getElementById("generate-problem");
const text = document.getElementById("generated");

async function generate(event) {
  event.preventDefault();
  const button = form.querySelector("button");
  const { prompt, characters, temperature, version } = form.elements;
  button.disabled = true;
  problem.textContent = "";
  try {
    const wanted = { characters: Number(characters.value), temperature: Number(temperature.value), version: version.value };
    const found = await ask("POST", `/v1/jobs/${form.dataset.job}/generate`, { prompt: prompt.value || "\n", seed: Math.floor(Math.random() * 2 ** 31), ...wanted });
    text.textContent = found.prompt + found.text;
    text.hidden = false;
  } catch (error) {
    problem.textContent = `No text was generated: ${error.message}`;
  } finally {
    button.disabled = false;
  }
}

form?.addEventListener("submit", generate);
