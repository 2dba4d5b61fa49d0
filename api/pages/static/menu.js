// Menus are popovers, which browsers open, place and close; one that has been used closes, and gives the focus back.

document.addEventListener("click", ({ target }) => {
  const item = target.closest(".menu button, .menu a");
  if (item && !item.matches("[data-copy], [aria-pressed]")) item.closest(".menu").hidePopover(); // those say what they did
}, true); // before a dialog opens, which remembers what had the focus
